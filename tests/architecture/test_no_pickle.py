"""Shipped code never executes the data that it reads: no pickle, no eval, no exec."""

import ast

import pytest

from architecture.sources import dotted_name, imported_names, relative, shipped_files, tree_of

MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
)
CALLS = frozenset({"eval", "exec", "torch.load", "torch.jit.load", "pandas.read_pickle"})


def breaches(tree: ast.Module) -> list[tuple[int, str]]:
    actual = [(line, name) for name, line in imported_names(tree) if name.split(".")[0] in MODULES]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if dotted_name(node.func) in CALLS:
            actual.append((node.lineno, dotted_name(node.func)))
        actual += [
            (node.lineno, "allow_pickle")
            for keyword in node.keywords
            if keyword.arg == "allow_pickle"
            and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        ]
    return actual


@pytest.mark.costly
def test_shipped_code_does_not_unpickle_or_evaluate():
    actual = [
        f"{relative(path)}:{line}: {what}"
        for path in shipped_files()
        for line, what in breaches(tree_of(path))
    ]
    advice = "read data as data (JSON, safetensors, columns):"
    assert not actual, "\n".join([advice, *actual])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "def f():\n    exec(code)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_unsafe_code_is_reported(source):
    assert breaches(ast.parse(source))


@pytest.mark.parametrize("source", ["model.eval()", "np.load(p, allow_pickle=False)", "load(p)"])
def test_similar_safe_code_is_not_reported(source):
    assert not breaches(ast.parse(source))
