"""Resolving: which plugin a user's reference means, under the user's rules."""
