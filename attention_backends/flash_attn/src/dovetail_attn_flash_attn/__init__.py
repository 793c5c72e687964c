"""Paged attention with FlashAttention 2 and 3, from the first suitable provider."""
