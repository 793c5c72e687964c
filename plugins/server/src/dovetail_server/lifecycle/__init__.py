"""The engine of the server: loading, readiness, admission of requests, and graceful shutdown."""
