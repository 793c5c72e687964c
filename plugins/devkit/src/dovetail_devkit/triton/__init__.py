"""Checks of Triton kernels without a GPU: ahead-of-time compilation and the interpreter."""
