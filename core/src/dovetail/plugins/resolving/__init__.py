"""Resolves a user's reference to a plugin, according to the user's rules."""
