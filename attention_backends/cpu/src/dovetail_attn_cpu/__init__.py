"""Paged attention on the CPU by native kernels."""
