"""Serves the decoders of transformers that have no native model."""
