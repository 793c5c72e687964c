"""The torch layer receives its device: no device name appears in its code."""

import ast
import io
import re
import tokenize

import pytest

from architecture.sources import ROOT, files_below, relative

DEVICE_NAMES = frozenset({"cuda", "cpu", "xpu", "mps", "hip", "rocm", "npu", "tpu", "hpu"})
TORCH_LAYER = ROOT / "platforms/torch/src"


def words(text: str) -> set[str]:
    return set(re.split(r"[^a-z]+", text.lower()))


def docstrings_of(tree: ast.Module) -> set[int]:
    """Return the ids of the constants that are docstrings of modules, functions or attributes."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


def device_names_in(source: str) -> list[tuple[int, str]]:
    collected = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and DEVICE_NAMES & words(token.string):
            collected.append((token.start[0], token.string))
    tree = ast.parse(source)
    documentation = docstrings_of(tree)
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text and id(node) not in documentation and DEVICE_NAMES & words(node.value):
            collected.append((node.lineno, repr(node.value)))
    return sorted(collected)


@pytest.mark.costly
def test_the_torch_layer_contains_no_device_name():
    actual = [
        f"{relative(path)}:{line}: {what}"
        for path in files_below(TORCH_LAYER, ".py")
        for line, what in device_names_in(path.read_text("utf-8"))
    ]
    advice = "take the device, or the operation, from the context or the platform's runtime:"
    assert not actual, "\n".join([advice, *actual])


@pytest.mark.parametrize(
    "source",
    [
        "x = 'cuda'",
        "x = f'cuda:{rank}'",
        "torch.cuda.synchronize()",
        "y = x.cpu()",
        "is_xpu = 1",
        "d = {'mps': 1}",
    ],
)
def test_a_device_name_in_code_is_reported(source):
    assert device_names_in(source)


@pytest.mark.parametrize("source", ["# a cuda device", '"""As on cpu."""', "x = 'encumbrance'"])
def test_device_names_in_strings_and_similar_words_are_not_reported(source):
    assert not device_names_in(source)
