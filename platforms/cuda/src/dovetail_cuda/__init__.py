"""The CUDA platform and worker of Dovetail."""
