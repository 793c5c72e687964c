"""Fixtures for the tests of the conformance kit."""

from dovetail_devkit.harnesses.plugin_site import count_as_member

__all__ = ["count_as_member"]
