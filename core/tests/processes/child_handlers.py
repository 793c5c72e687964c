"""Handlers for a sandboxed child in tests. Imports nothing."""


def answer(request, blob):
    return request


def __getattr__(name):
    """Fail in the way that the handler's name states, while the handler is loaded."""
    if name == "exits":
        import os

        os._exit(3)
    raise RuntimeError("the handler melted")
