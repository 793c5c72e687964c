"""Communication between processes: frames, a shared-memory ring, typed messages.

Received bytes are checked and never executed; invalid bytes raise a MessageError.
"""
