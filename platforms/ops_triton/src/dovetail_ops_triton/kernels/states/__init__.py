"""Kernels of operations with states, and the functions that launch them."""
