"""Executors of the core."""
