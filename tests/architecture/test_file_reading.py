"""The files of a model directory are read in one module, which rejects irregular files."""

import ast

from architecture.sources import ROOT, dotted_name, relative, shipped_files, tree_of

READERS = (
    "core/src/dovetail/config",
    "core/src/dovetail/tokenizers",
    "model_registry/src",
    "platforms/torch/src/dovetail_torch/weights",
)
"""The directories whose code reads model directories."""
OPENING = frozenset({"from_file", "read_bytes", "read_text", "open", "is_file", "isfile"})

# Maps (file, call) to the reason why it does not use `dovetail.model_files`.
EXCEPTIONS = {
    ("core/src/dovetail/config/model_directory.py", "os.path.isfile"): "the directory is a file",
    (
        "core/src/dovetail/config/assembly.py",
        "ModelDirectory.open",
    ): "the module uses dovetail.model_files",
    ("core/src/dovetail/tokenizers/tokenizer_trial.py", "os.open"): "files in a private directory",
}


def opening_calls(tree: ast.Module) -> set[str]:
    """Return the calls that open or inspect a file directly, and calls that load JSON files."""
    calls = {
        dotted_name(node.func) or getattr(node.func, "attr", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    return {name for name in calls if name.split(".")[-1] in OPENING or name == "json.load"}


def found_calls() -> set[tuple[str, str]]:
    files = [
        path
        for path in shipped_files()
        if any(relative(path).startswith(f"{folder}/") for folder in READERS)
    ]
    assert len(files) > 20
    return {(relative(path), call) for path in files for call in opening_calls(tree_of(path))}


def test_model_files_are_read_in_one_module():
    actual = sorted(found_calls() - EXCEPTIONS.keys())
    assert not actual, f"read it with dovetail.model_files: {actual}"


def test_each_listed_exception_is_still_needed():
    assert not EXCEPTIONS.keys() - found_calls()
    assert (ROOT / "core/src/dovetail/model_files.py").is_file()


def test_the_check_finds_every_way_to_open_a_file():
    for source in (
        "open('x')",
        "path.open()",
        "(folder / 'x').read_text()",
        "Path('x').read_bytes()",
        "os.open('x', 0)",
        "Tokenizer.from_file('x')",
        "json.load(f)",
    ):
        assert opening_calls(ast.parse(source)), source
    assert not opening_calls(ast.parse("read_json_object(path); json.loads(text)"))
