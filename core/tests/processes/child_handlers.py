"""What a child with limits is asked to do in tests. Imports nothing."""


def answer(request, blob):
    return request


def __getattr__(name):
    """Go wrong in the way that the handler's name says, as a handler that cannot be loaded."""
    if name == "exits":
        import os

        os._exit(3)
    raise RuntimeError("the handler melted")
