"""Kernels of recurrent operations, and the functions that launch them."""
