"""Clients of a server: `dovetail complete` and `dovetail chat --url`."""
