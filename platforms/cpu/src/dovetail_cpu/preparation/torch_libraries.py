"""Loads torch's shared libraries in a thread, while the program executes Python code.

Loading them takes a tenth of the import of torch. It is C++ code that does not need the interpreter
lock, but the import statement holds this lock. This module does not import torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

from dovetail.processes.affinity import BINDING_VARIABLES

_FIRST, _LARGE = "libtorch_global_deps.so", "libtorch_cpu.so"


def preload_torch() -> threading.Thread | None:
    """Start to load torch's libraries, and return the thread, or None if nothing is to be loaded.

    `import torch` waits for the thread. While it runs, imports of other extension modules wait.
    """
    folder = _library_folder()
    if folder is None:
        return None
    thread = threading.Thread(target=_load, args=(folder,), name="dovetail-torch-libraries")
    try:
        thread.start()
    except RuntimeError:  # the limit on threads may be reached; `import torch` loads them
        return None
    return thread


def _library_folder() -> Path | None:
    """Return the directory of torch's libraries if they may be loaded in another thread."""
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    # OpenMP binds the thread that loads it to a CPU, which must be the main thread.
    if any(os.environ.get(name) for name in BINDING_VARIABLES):
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    names = {path.name for path in folder.glob("libtorch_*.so")}
    # torch itself loads the libraries of accelerators, in an order of its own.
    is_cpu_build = not names & {"libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so"}
    return folder if is_cpu_build and {_FIRST, _LARGE} <= names else None


def _load(folder: Path) -> None:
    """Load the libraries as `import torch` does. An error is left to `import torch`."""
    program = ctypes.CDLL(None)
    if not hasattr(program, "dlopen"):
        return
    # `ctypes.CDLL(path)` would hold the interpreter lock; a call of the function releases it.
    program.dlopen.restype = ctypes.c_void_p
    program.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    program.dlopen(os.fsencode(folder / _FIRST), os.RTLD_NOW | os.RTLD_GLOBAL)
    program.dlopen(os.fsencode(folder / _LARGE), os.RTLD_NOW)
