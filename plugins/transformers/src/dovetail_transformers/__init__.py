"""Serves decoder models of the transformers library that have no native implementation."""
