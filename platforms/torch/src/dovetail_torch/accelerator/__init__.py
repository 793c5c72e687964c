"""Code that all asynchronous devices with a torch module share.

Platforms add the differences: whether a device exists, its capabilities, and how ranks join.
Importing this package does not import torch: a platform's probe reads `torch_build`.
"""
