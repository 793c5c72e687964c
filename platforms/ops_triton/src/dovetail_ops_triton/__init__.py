"""Triton kernels for the small fused operations between matrix products."""
