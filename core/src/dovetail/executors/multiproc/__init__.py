"""Workers in processes of their own: the executor `multiproc`.

    executor          the contract's side: sends orders
    answers           the workers' answers, and the handles that wait for them
    launch            starts the processes, with what they share
    worker_processes  watches the processes and ends them when one fails
    boot              the messages exchanged while a process starts
    host              in the worker's process: makes the worker and carries out orders
    heartbeat         one heartbeat for each worker, written by a thread of its own
    options           the options a user may set

An executor gives orders over one ring that all workers read, and each worker answers over a ring of
its own; both are in `dovetail.transport`. A process is started with exec, in a session of its own,
from `python -m dovetail.executors.multiproc`.
"""
