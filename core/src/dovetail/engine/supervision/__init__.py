"""Supervision: restarts an engine that fails, and reports its state at any time.

    channel        `SupervisedChannel`, which wraps the channels of successive engines
    supervisor     owns the channel to the running engine, and replaces it
    work           the unfinished calls and requests of an engine
    crash_tracker  which requests crash an engine
    restarts       when the next restart is due, if any
    rules          limits and delays of restarts, and the definition of a stall

A supervised engine fails the requests that were unfinished when it failed; none is run again.
"""
