"""Loads quantized safetensors checkpoints: GPTQ, AWQ, compressed-tensors and FP8."""
