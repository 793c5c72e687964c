"""Compilation of a model's forward pass with torch.compile: levels, backends, passes and cache."""
