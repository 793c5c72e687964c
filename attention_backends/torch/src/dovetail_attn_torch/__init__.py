"""Paged attention in plain torch: the reference that other backends are held against."""
