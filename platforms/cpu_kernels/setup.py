"""Build the native library of dovetail-cpu-kernels with only a C++ compiler.

Every `src/native/*_level.cpp` is compiled once per instruction set level, every other source once,
two at a time, and linked into one `_native.so` next to the package. A failed build does not fail
the installation: `_build.json` next to the library contains the compiler's command, or the reason
why the library is missing.

    CXX=clang++ pip install ./platforms/cpu_kernels       another compiler
    python setup.py build_ext --inplace                   in place; compiles only changed sources
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "dovetail_cpu_kernels"
LIBRARY = "_native.so"
REPORT = "_build.json"
MAX_JOBS = 2
# Without contraction to fused multiply-adds, results are bitwise equal in every context.
FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
OPTIMIZATION = "-O3"
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")


@dataclass(frozen=True, kw_only=True)
class Level:
    """An instruction set. number: DK_LEVEL.

    only: stems of its sources; if empty, all except TILES and WIDE. also: stems of more sources.
    """

    number: int
    flags: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


GROUPS = ("linear_groups_level",)
TILES = ("group_tiles_level", "linear_tiles_level")
WIDE = ("wide_groups_level",)
# Order: DK_PORTABLE ... DK_AVX512_AMX of dovetail_kernels.h.
LEVELS = {
    "portable": Level(number=0),
    "avx2": Level(number=1, flags=AVX2, also=WIDE),
    "avx2_vnni": Level(number=1, flags=(*AVX2, "-mavxvnni"), only=GROUPS),
    "avx512": Level(number=2, flags=AVX512),
    "avx512_vnni": Level(number=2, flags=(*AVX512, "-mavx512vnni"), only=GROUPS),
    "avx512_bf16": Level(number=3, flags=AVX512_BF16),
    "avx512_amx": Level(
        number=3,
        flags=(*AVX512_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        only=(*TILES, "attention_level", "bidirectional_level"),
    ),
}


class BuildError(Exception):
    """The library cannot be built on this machine. Users see the message."""


@dataclass(frozen=True, kw_only=True)
class Object:
    """One compilation: a source file, its flags, and the path of the object file."""

    source: Path
    path: Path
    flags: tuple[str, ...]


def is_x86() -> bool:
    """Return whether this machine supports the vector instruction sets."""
    return platform.machine().lower() in ("x86_64", "amd64")


def plan(folder: Path, levels: Iterable[str] = LEVELS) -> list[Object]:
    """Return the compilations into `folder`, in linking order: lowest level first (dispatch.h)."""
    sources = sorted((ROOT / "src/native").glob("*.cpp"))
    leveled = [source for source in sources if source.stem.endswith("_level")]
    objects = [
        Object(source=source, path=folder / f"{source.stem}.o", flags=())
        for source in sources
        if source not in leveled
    ]
    for name in levels if is_x86() else ("portable",):
        level = LEVELS[name]
        macros = (f"-DDK_LEVEL={level.number}", f"-DDK_LEVEL_NAMESPACE={name}")
        everywhere = {source.stem for source in leveled}.difference(TILES, WIDE)
        stems = {*(level.only or everywhere), *level.also}
        for source in (source for source in leveled if source.stem in stems):
            path = folder / f"{source.stem}.{name}.o"
            objects.append(Object(source=source, path=path, flags=(*macros, *level.flags)))
    return objects


def accepted_levels(compiler: list[str]) -> list[str]:
    """Return the levels whose flags the compiler knows. The library lacks the others."""
    command = [*compiler, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    accepted = []
    for name, level in LEVELS.items():
        try:
            run([*command, *level.flags], f"testing the level {name}")
        except BuildError:
            if not level.flags:
                raise
            continue
        accepted.append(name)
    return accepted


def run(command: list[str], purpose: str) -> str:
    """Run a compiler and return its output. Raise BuildError with the end of the output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"no C++ compiler: {command[0]}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise BuildError(
            f"{command[0]} exited with status {done.returncode} while {purpose}: {said}"
        )
    return done.stdout


def compile_all(compiler: list[str], objects: list[Object], flags: tuple[str, ...]) -> None:
    """Compile all objects that are older than their source or any header. The slowest first."""
    headers = [*ROOT.glob("include/*.h"), *ROOT.glob("src/native/*.h"), Path(__file__)]
    changed = max(path.stat().st_mtime for path in headers)
    includes = (f"-I{ROOT / 'include'}", f"-I{ROOT / 'src/native'}")

    def is_old(target: Object) -> bool:
        newest = max(changed, target.source.stat().st_mtime)
        return not target.path.is_file() or target.path.stat().st_mtime < newest

    def compile_one(target: Object) -> None:
        fresh = target.path.with_suffix(".tmp.o")
        what = (*target.flags, "-c", str(target.source), "-o", str(fresh))
        run([*compiler, *flags, *includes, *what], f"compiling {target.path.stem}")
        fresh.replace(target.path)

    old = sorted(filter(is_old, objects), key=lambda item: item.path.stem, reverse=True)
    with ThreadPoolExecutor(min(MAX_JOBS, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, old))


def build_library(target: Path, folder: Path, flags: tuple[str, ...] = ()) -> str:
    """Build the library as `target` with objects below `folder`. Return the compiler's command.

    Objects are stored by compiler and flags, and only changed sources are recompiled. An
    editable installation and a wheel share objects.

    Raises BuildError if the build fails.
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the thread team needs Linux, and this is {sys.platform}")
    flags = (*FLAGS, *(flags or (OPTIMIZATION,)))
    version = run([*compiler, "--version"], "asking for its version")
    made_by = hashlib.sha256(f"{shlex.join([*compiler, *flags])}\n{version}".encode()).hexdigest()
    folder = folder / made_by[:12]
    folder.mkdir(parents=True, exist_ok=True)
    objects = plan(folder, accepted_levels(compiler))
    compile_all(compiler, objects, flags)
    fresh = target.with_suffix(".tmp.so")
    paths = [str(item.path) for item in objects]
    run([*compiler, *flags, "-shared", *paths, "-o", str(fresh)], "linking")
    fresh.replace(target)
    return shlex.join(compiler)


class BuildNative(build_ext):
    """Builds the library instead of a Python extension.

    A failed build raises no error, but is reported.
    """

    def run(self) -> None:
        """Write the library and the build report to the package's directory."""
        in_place = self.inplace or getattr(self, "editable_mode", False)
        package = (ROOT / "src" if in_place else Path(self.build_lib)) / PACKAGE
        package.mkdir(parents=True, exist_ok=True)
        library, report = package / LIBRARY, {"compiler": "", "reason": ""}
        try:
            report["compiler"] = build_library(library, ROOT / "build/objects")
        except BuildError as error:
            library.unlink(missing_ok=True)
            report["reason"] = str(error)
            print(f"warning: no native kernels: {error}", file=sys.stderr)
        (package / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")

    def get_outputs(self) -> list[str]:
        """Return the written files, for the record of installed files."""
        package = Path(self.build_lib) / PACKAGE
        return [str(path) for path in (package / LIBRARY, package / REPORT) if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        """Return an empty mapping: editable installations build in place."""
        return {}


class PlatformWheel(bdist_wheel):
    """Tag wheels with the platform, and with any Python 3: the library is loaded by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return (python, abi, platform)."""
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    """A distribution that is never pure Python."""

    def has_ext_modules(self) -> bool:
        """Return True, even if the library could not be built."""
        return True


if __name__ == "__main__":
    setup(
        distclass=NativeDistribution,
        ext_modules=[Extension(f"{PACKAGE}._native", sources=[])],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    )
