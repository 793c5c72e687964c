"""Several API processes for one engine (`--api-processes`).

The main process owns the engine and the listening sockets, and serves no requests. Each API process
is attached to the engine and accepts connections from the shared sockets.
"""
