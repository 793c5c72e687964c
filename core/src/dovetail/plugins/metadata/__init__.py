"""Reads the metadata and manifests of installed distributions without importing packages."""
