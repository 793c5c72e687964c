"""Metadata: what installed distributions and their manifests say, read without importing them."""
