"""The `multiproc` executor: each worker runs in its own process.

    executor     the executor contract: sends commands
    responses    the workers' responses, and the handles that wait for them
    launch       starts the processes, with the rings that they share with the executor
    worker_main  the worker's process: creates the worker, then runs `host`
    host         executes the commands in the worker's process
    options      the options of the executor

An executor sends commands over one ring that all workers read, and each worker responds over its
own ring; both are in `dovetail.transport`. The processes are children of `dovetail.processes`.
"""
