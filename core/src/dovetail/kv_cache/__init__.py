"""The KV cache manager with block pool and prefix index. It uses no tensors."""
