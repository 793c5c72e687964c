"""Code that all asynchronous devices with a torch module share.

A platform adds its own part: whether a device exists, its capabilities, and how ranks join.
Importing this package does not import torch: a platform's probe reads `torch_build`.
"""
