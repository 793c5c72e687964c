"""Handlers for a sandboxed child in tests. Imports nothing."""


def answer(request, blob):
    return request


def __getattr__(name):
    """Fail as the handler's name says, like a handler that cannot be loaded."""
    if name == "exits":
        import os

        os._exit(3)
    raise RuntimeError("the handler melted")
