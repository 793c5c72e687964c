"""Paged attention in Triton kernels of our own."""
