"""Stored responses, files and batches, shared by the API processes of a server."""
