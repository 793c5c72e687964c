"""Loads quantized safetensors checkpoints: `FORMATS` in `checkpoint` lists the formats."""
