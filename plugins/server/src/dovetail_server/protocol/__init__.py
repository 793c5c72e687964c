"""Requests and responses of the OpenAI API, without sockets and without an engine."""
