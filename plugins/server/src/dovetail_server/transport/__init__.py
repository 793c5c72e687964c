"""Connections: limits, request ids, keys, responses and streams of events."""
