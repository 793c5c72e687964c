"""Building and loading the library: levels, and the reason if there is no compiler."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels.structs import STRUCTS

MEMBER = Path(__file__).resolve().parents[1]
PROGRAM = (
    "import json, dataclasses, dovetail_cpu_kernels as native;"
    "print(json.dumps(dataclasses.asdict(native.status())))"
)

needs_library = pytest.mark.skipif(
    not native.status().available, reason=f"no native library: {native.status().reason}"
)


def copy_member(folder):
    """Return a copy of the package's sources without build outputs."""
    ignored = shutil.ignore_patterns(
        "build", "*.egg-info", "__pycache__", "_native*", "_build.json"
    )
    return Path(shutil.copytree(MEMBER, folder / "member", ignore=ignored))


def run_setup(member, *command, **variables):
    arguments = [sys.executable, "setup.py", "-q", *command]
    environment = {**os.environ, **variables}
    done = subprocess.run(arguments, cwd=member, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def status_of(source, **variables):
    environment = {**os.environ, "PYTHONPATH": str(source), **variables}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        ("/bin/false", "exited with status 1"),
        ("/nowhere/c++", "No such file"),
        ("c++ -fnonsense", "fnonsense"),
    ],
)
def test_after_a_failed_build_the_package_reports_the_reason(tmp_path, compiler, says):
    if compiler.startswith("c++") and not shutil.which("c++"):
        pytest.skip("no c++")
    member = copy_member(tmp_path)
    warned = run_setup(member, "build_ext", "--inplace", CXX=compiler)
    assert "no native kernels" in warned
    status = status_of(member / "src")
    assert not status["available"] and status["level"] == ""
    assert says in status["reason"] and "C++17 compiler" in status["reason"]


@pytest.mark.costly
def test_a_wheel_that_was_built_without_a_library_contains_the_reason(tmp_path):
    member = copy_member(tmp_path)
    run_setup(member, "bdist_wheel", "--dist-dir", str(tmp_path / "wheels"), CXX="/bin/false")
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert re.fullmatch(r"dovetail_cpu_kernels-.*-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    assert "/bin/false" in status_of(tmp_path / "installed")["reason"]


@needs_library
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: b"no library", "cannot be loaded"),
        (lambda content: b"", "cannot be loaded"),
    ],
)
def test_a_damaged_native_library_is_reported_as_not_available(tmp_path, damage, says):
    package = Path(
        shutil.copytree(
            MEMBER / "src/dovetail_cpu_kernels", tmp_path / "src" / "dovetail_cpu_kernels"
        )
    )
    library = package / "_native.so"
    library.write_bytes(damage(library.read_bytes()))
    status = status_of(tmp_path / "src")
    assert not status["available"] and says in status["reason"]


@needs_library
def test_an_environment_variable_lowers_the_instruction_set_level():
    source = MEMBER / "src"
    highest = status_of(source, DOVETAIL_CPU_LEVEL="")
    assert highest["available"] and not highest["reason"]
    assert native.LEVELS[native.usable_levels()[-1]] == highest["level"]
    for level in (native.LEVELS[number] for number in native.usable_levels()[:-1]):
        status = status_of(source, DOVETAIL_CPU_LEVEL=level)
        assert status["level"] == level and highest["level"] in status["reason"]
    rejected = status_of(source, DOVETAIL_CPU_LEVEL="mmx")
    assert not rejected["available"] and ", ".join(native.LEVELS) in rejected["reason"]


@needs_library
def test_an_older_library_is_rejected(tmp_path):
    """If the package is updated without a rebuild, the library has an older ABI version."""
    source = tmp_path / "src"
    package = Path(
        shutil.copytree(MEMBER / "src/dovetail_cpu_kernels", source / "dovetail_cpu_kernels")
    )
    text = (package / "library.py").read_text("utf-8")
    (package / "library.py").write_text(re.sub(r"(?m)^ABI_VERSION = .*", "ABI_VERSION = 999", text))
    status = status_of(source)
    assert not status["available"] and "ABI version" in status["reason"]


def copy_package(folder, *, file, before, after):
    """Copy the installed package, replace a string in one file, and return the path of the copy."""
    source = folder / "src"
    package = shutil.copytree(MEMBER / "src/dovetail_cpu_kernels", source / "dovetail_cpu_kernels")
    text = (Path(package) / file).read_text("utf-8")
    assert before in text
    (Path(package) / file).write_text(text.replace(before, after, 1))
    return source


@needs_library
@pytest.mark.parametrize(
    ("file", "before", "after", "says"),
    [
        ("library.py", "PACK_VERSION = ", "PACK_VERSION = 90 + ", "packed format"),
        (
            "linear.py",
            '("kind", ctypes.c_int64),',
            '("kind", ctypes.c_int64), ("new", ctypes.c_int64),',
            "bytes of dk_pack_linear_args:",
        ),
    ],
)
def test_a_library_with_different_structs_or_packed_formats_is_rejected(
    tmp_path, file, before, after, says
):
    status = status_of(copy_package(tmp_path, file=file, before=before, after=after))
    assert not status["available"]
    assert says in status["reason"] and "reinstall dovetail-cpu-kernels" in status["reason"]


@needs_library
def test_the_ctypes_definition_of_every_header_struct_is_checked():
    texts = [path.read_text("utf-8") for path in (MEMBER / "include").glob("*.h")]
    struct_names = {name for text in texts for name in re.findall(r"^} (dk_\w+);", text, re.M)}
    assert struct_names - {"dk_call"} == set(STRUCTS)
    assert native.library().dk_struct_bytes(b"dk_call") == 0


@needs_library
def test_header_and_package_have_the_same_versions():
    header = (MEMBER / "include/dovetail_kernels.h").read_text("utf-8")
    assert f"#define DK_ABI_VERSION {native.library().dk_abi_version()}" in header
    assert f"#define DK_PACK_VERSION {native.library().dk_pack_version()}" in header


@pytest.mark.skipif(not shutil.which("c++"), reason="no c++")
def test_instruction_set_levels_with_flags_unknown_to_the_compiler_are_not_built(tmp_path):
    """An old compiler rejects the newest flags, but the other levels must still be built."""
    setup = runpy.run_path(str(MEMBER / "setup.py"), run_name="setup")
    old = tmp_path / "c++"
    old.write_text('#!/bin/sh\ncase "$*" in *-mamx*|*-mavxvnni*) exit 1;; esac\nexec c++ "$@"\n')
    old.chmod(0o755)
    known = setup["accepted_levels"](["c++"])
    expected = [name for name in known if name not in ("avx2_vnni", "avx512_amx")]
    assert setup["accepted_levels"]([str(old)]) == expected
    names = {item.path.name for item in setup["plan"](tmp_path, expected)}
    assert not any("amx" in name for name in names)
    assert ("linear_level.avx512_bf16.o" in names) == setup["is_x86"]()


@needs_library
def test_the_sanitizers_run_the_levels_of_this_cpu():
    """Others take minutes to compile, and cannot run."""
    sanitize = runpy.run_path(str(MEMBER / "sanitize.py"), run_name="sanitize")
    levels = runpy.run_path(str(MEMBER / "setup.py"), run_name="setup")["LEVELS"]
    flags_of = {name: level.flags for name, level in levels.items()}
    cpu_info = Path("/proc/cpuinfo").read_text("utf-8")
    usable = {native.LEVELS[number] for number in native.usable_levels()}
    assert usable.issubset(sanitize["usable_levels"](flags_of, cpu_info))
    older = "model name: a CPU\nflags\t\t: fpu avx avx2 fma f16c avx_vnni\nflags\t\t: avx512f\n"
    assert sanitize["usable_levels"](flags_of, older) == ["portable", "avx2", "avx2_vnni"]
    assert sanitize["usable_levels"](flags_of, "") == ["portable"]
    first, *others = sanitize["sampled_levels"](["portable", "avx2"])
    assert (first, others) == ("portable", ["avx2"])


def test_avx2_without_byte_products_multiplies_16_bit_numbers(tmp_path):
    """Levels with byte products, and AVX-512, do not contain the kernel for such numbers."""
    setup = runpy.run_path(str(MEMBER / "setup.py"), run_name="setup")
    names = {item.path.name for item in setup["plan"](tmp_path)}
    wide = {name for name in names if name.startswith("wide_groups")}
    assert wide == ({"wide_groups_level.avx2.o"} if setup["is_x86"]() else set())


@pytest.mark.costly
@pytest.mark.skipif(not (shutil.which("nm") and shutil.which("c++")), reason="no nm or no c++")
def test_the_libraries_of_different_instruction_sets_share_no_function(tmp_path):
    """The linker keeps one copy of a shared function, which an older CPU may not be able to run."""
    setup = runpy.run_path(str(MEMBER / "setup.py"), run_name="setup")
    objects = [item for item in setup["plan"](tmp_path) if item.path.name.endswith("_level.avx2.o")]
    setup["compile_all"](["c++"], objects, (*setup["FLAGS"], setup["OPTIMIZATION"]))
    for item in objects:
        symbols = subprocess.run(["nm", "-C", item.path], capture_output=True, text=True).stdout
        shared = re.findall(r"^\w* +[WVu] (.*)$", symbols, re.M)
        assert not shared, f"{item.source.name}: always inline these, or avoid them: {shared}"
    assert bool(objects) == setup["is_x86"]()


def test_no_source_file_is_compiled_for_the_build_machine_only():
    assert "-march" not in (MEMBER / "setup.py").read_text("utf-8")
