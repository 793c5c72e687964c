"""The engine core in a process of its own, and the clients that speak with it.

`factory.make_client` gives an `EngineClient` of a kind: in process, or over a process, sync or
async. The process is started with exec, from `python -m dovetail.engine.process`; what crosses
the border is in `dovetail.transport.messages`.
"""
