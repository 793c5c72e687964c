"""The op provider `native`: small operations and recurrent operations, in native kernels."""

from dovetail_cpu.native_ops.provider import NativeOps

__all__ = ["NativeOps"]
