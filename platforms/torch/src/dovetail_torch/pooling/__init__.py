"""Pooled results: one vector or one score for a prompt, or one vector for each token."""
