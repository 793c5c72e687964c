"""Supervision: an engine that is started again when it dies, and says at any time how it is.

    rules          how often and how fast an engine is started again, what counts as a stall
    engine_status  what both clients tell of their engine without asking it
    restarts       when the next start is due, if there is to be one
    crash_tracker  which requests an engine dies of
    supervisor     owns the engine's client, watches it, and puts another in its place
    client         `SupervisedClient`, for one thread
    async_client   `AsyncSupervisedClient`, for an event loop

A supervised engine fails the requests that were under way when it died; it replays nothing.
"""
