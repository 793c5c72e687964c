"""Model architectures of Dovetail: Llama, Mistral, Qwen2, Qwen3.

Importing this package imports no torch: entry points of the group `dovetail.model` name the
classes, and only what was chosen is loaded.
"""
