"""Communication between processes: frames, a shared-memory ring, typed messages.

Received bytes are data: they are checked, refused with a typed error if invalid, never executed.
"""
