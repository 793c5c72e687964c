"""The parts of `bench/quality.py`: texts, references, engines, metrics.

texts       excerpts of installed packages, fixed by hash
references  a GGUF file as a Hugging Face directory, as published or with added noise
formats     the formats of Dovetail and of other engines
run         all formats and layers in turn
job         one format in one process: metrics from the logits of an engine
metrics     perplexity, divergence and most likely tokens from logits
positions   metrics of single positions from logits
fidelity    one GGUF file in two engines, position by position
engine_*    one engine each, with its own interpreter
conversion  the files that other engines read
layers      errors of single layers of all-MiniLM-L6-v2
quantize_dequantize  quantization with llama.cpp, in its own process
results     the files of results, and formats of an earlier run
report      tables and the plot
"""
