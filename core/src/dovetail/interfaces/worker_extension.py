"""The contract of a worker extension: methods that are added to a worker, to be called by name.

`EngineArgs.worker_extension_cls` names one; the executor makes a subclass of worker and extension
and calls its methods through `collective_rpc("name")`. It is for what an engine never calls itself:
looking into weights, swapping them, measuring.
"""

from __future__ import annotations

from typing import ClassVar


class WorkerExtension:
    """A class of methods; `self` is the worker.

    Contract. It brings methods and constants, and no constructor: the worker has one. None of its
    names is one of the worker's class or contract. What it keeps on `self`, it keeps under names of
    its own, such as `_myplugin_count`.
    """

    CONTRACT: ClassVar[str] = "worker_extension"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
