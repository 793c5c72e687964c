"""The parts of `bench/quality.py`: texts, references, engines, figures.

texts       excerpts of installed packages, fixed by hash
references  a GGUF file as a Hugging Face directory, as published or off its grid
formats     the formats of Dovetail and of the peers
job         one format in one process: figures from the logits of an engine
figures     perplexity, divergence and best tokens from logits
engine_*    one engine each, with its own interpreter
conversion  the files that peers read
layers      errors of single layers of all-MiniLM-L6-v2
report      tables and the plot
"""
