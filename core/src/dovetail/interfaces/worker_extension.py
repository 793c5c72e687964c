"""The contract of a worker extension: methods that are added to a worker and called by name.

`EngineArgs.worker_extension_cls` names the extension. The executor creates a subclass of worker and
extension; users call its methods with `collective_rpc("name")`. Use it for operations that the
engine itself never calls, such as inspecting or swapping weights and measuring.
"""

from __future__ import annotations

from typing import ClassVar


class WorkerExtension:
    """A class of methods whose `self` is the worker.

    Contract. It defines methods and constants, but no constructor. Its names must not occur in the
    worker's class or contract. Attributes that it sets on `self` have a prefix of the plugin, such
    as `_myplugin_count`.
    """

    CONTRACT: ClassVar[str] = "worker_extension"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
