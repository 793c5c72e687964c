"""Paged attention with the library FlashInfer."""
