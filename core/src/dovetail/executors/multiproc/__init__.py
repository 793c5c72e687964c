"""Workers in processes of their own: the executor `multiproc`.

    executor     the contract's side: sends orders
    answers      what the workers answer, and the handles that wait for it
    launch       starts the processes, with the rings that they share with the executor
    worker_main  the worker's process: from its settings to a worker that serves
    host         carries out the orders in the worker's process
    options      what a user may set

An executor sends orders over one ring that all workers read, and each worker answers over a ring of
its own; both are in `dovetail.transport`. The processes are children of `dovetail.processes`.
"""
