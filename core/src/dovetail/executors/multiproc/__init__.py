"""Workers in processes of their own: the executor `multiproc`.

    executor    the contract's side: orders out
    answers     what the workers answer, and the handles that wait for it
    launch      starts the processes, with what they share
    crew        watches the processes, and takes them down, whatever happens
    boot        what a process is told when it starts, and what it tells before it serves
    host        in the worker's process: makes the worker, late, and does what is ordered
    pulse       a sign of life of each worker, apart from what it is doing
    options     what a user may set

An executor gives orders over one ring that all workers read, and each worker answers over a ring of
its own; both are in `dovetail.transport`. A process is started with exec, in a session of its own,
from `python -m dovetail.executors.multiproc`.
"""
