"""Handlers for a sandboxed child process in tests. This module imports no other module."""


def answer(request, blob):
    return request


def __getattr__(name):
    """Fail when the child loads a handler: exit for the name "exits", else raise an error."""
    if name == "exits":
        import os

        os._exit(3)
    raise RuntimeError("the handler melted")
