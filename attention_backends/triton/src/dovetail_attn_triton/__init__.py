"""Paged attention in Triton kernels."""
