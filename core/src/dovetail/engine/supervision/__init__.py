"""Supervision: an engine that is started again when it dies, and says at any time how it is.

    channel        `SupervisedChannel`, which stands for the channels to one engine after the other
    supervisor     owns the channel to the engine that runs, and puts another in its place
    work           the calls and requests that an engine has not finished with
    crash_tracker  which requests an engine dies of
    restarts       when the next start is due, if there is to be one
    rules          how often and how fast an engine is started again, what counts as a stall

A supervised engine fails the requests that were under way when it died; it replays nothing.
"""
