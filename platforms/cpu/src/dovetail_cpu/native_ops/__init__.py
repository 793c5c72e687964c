"""The op provider `native`: small operations and operations with states, in native kernels."""

from dovetail_cpu.native_ops.provider import NativeOps

__all__ = ["NativeOps"]
