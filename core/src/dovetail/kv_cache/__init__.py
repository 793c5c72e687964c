"""The KV cache: block pool, prefix index and the manager in front of them. No tensors."""
