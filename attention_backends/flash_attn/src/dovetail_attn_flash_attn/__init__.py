"""Paged attention with FlashAttention 2 and 3, from the first installed provider that fits."""
