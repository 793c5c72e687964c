"""Requests and responses of the OpenAI API. Independent of sockets and of an engine."""
