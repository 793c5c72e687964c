"""Paged attention in plain torch: the reference for other backends."""
