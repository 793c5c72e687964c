"""Writes GGUF files for tests: vocabularies and small models, by the rules of the converter."""
