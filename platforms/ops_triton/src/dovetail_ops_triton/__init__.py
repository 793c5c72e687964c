"""The small fused operations between matrix products, in Triton kernels of our own."""
