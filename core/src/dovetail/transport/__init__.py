"""How messages get from one process to another: frames, a shared-memory ring, typed messages.

Bytes that arrive are data: they are checked and refused with a typed error, never executed.
"""
