"""GGUF model files: configuration, tokenizer, chat template and weights of one file.

    reader        the container: metadata and tensor directory, checked and memory-mapped
    model_format  the plugin that describes a file: from metadata to the fields of config.json
    tokenizer     the plugin that builds the tokenizer from the vocabulary in the metadata
    weight_loader the plugin that fills a model, or passes quantized blocks to it

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from dovetail_gguf.reader import GGUFFile, TensorInfo

__all__ = ["GGUFFile", "TensorInfo"]
