"""The contract of a worker extension: methods that are added to a worker and called by name.

`EngineArgs.worker_extension_cls` names the extension. The executor creates a subclass of the
worker's class and the extension; users call the methods with `collective_rpc("name")`. Extensions
are for operations that the engine itself never calls, such as inspecting or replacing weights and
measuring.
"""

from __future__ import annotations

from typing import ClassVar


class WorkerExtension:
    """A class with methods for which `self` is the worker.

    Contract: It defines methods and constants, but no constructor. Its names must not occur in the
    worker's class or contract. Attributes that it sets on `self` have a prefix of the plugin, such
    as `_myplugin_count`.
    """

    CONTRACT: ClassVar[str] = "worker_extension"
    CONTRACT_VERSION: ClassVar[str] = "0.1"
