"""The model runner and its parts: rows, input batch, KV cache tensors."""
