"""Paged attention with torch operations: the reference for other backends."""
