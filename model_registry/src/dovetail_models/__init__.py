"""Model architectures of Dovetail: Llama, Mistral, Qwen2, Qwen3.

Importing this package does not import torch. The entry points of the group `dovetail.model` name
the classes, and only the selected class is imported.
"""
