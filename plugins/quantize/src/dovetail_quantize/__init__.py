"""The command `dovetail quantize`.

quantize_command    the command
run                 the steps of the command
texts               calibration and evaluation texts as chunks of tokens
opened_model        a model in the engine whose layers can be observed and changed
calibration         second moments of the inputs of linear layers
gptq, awq           quantization methods that use these moments
quantize_options    the options
layer_plan          which block type each layer has
quantizing          quantizes a model, some decoder layers at a time
evaluation          perplexity, and KL divergence from the original model
checkpoint          writes a GGUF file and the files of the tokenizer
rounding            rounds weights to block types
"""
