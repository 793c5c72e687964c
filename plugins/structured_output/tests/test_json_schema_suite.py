"""The JSON Schema test suite: no schema that is accepted permits an invalid value.

The suite is in the source archive of the `jsonschema` package, which pip downloads.
"""

import json
import os
import subprocess
import sys
import tarfile

import pytest

from dovetail.errors import RequestError
from dovetail.interfaces import GrammarContext, GrammarSpec
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_structured_output.backend import LLGuidance

pytestmark = pytest.mark.soak

ARCHIVE = "jsonschema==4.26.0"
DRAFTS = ("draft2019-09", "draft2020-12")
"""Schemas are read as in these drafts; draft 7 ignores keywords next to `$ref`."""
SEPARATORS = ((", ", ": "), (",", ":"))
CLAIMED = {
    *("additionalProperties", "allOf", "anyOf", "boolean_schema", "const", "enum"),
    *("exclusiveMaximum", "exclusiveMinimum", "format", "items", "maximum", "maxItems"),
    *("maxLength", "maxProperties", "minimum", "minItems", "minLength", "minProperties"),
    *("multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties", "ref"),
    *("required", "type"),
}
"""The keywords that the plugin supports, at least in part."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """Return the cases of the suite: draft, keyword and content."""
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--no-binary", "jsonschema", ARCHIVE]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        give_up = pytest.fail if os.environ.get("DOVETAIL_REQUIRE_DOWNLOADS") else pytest.skip
        give_up(f"the suite cannot be downloaded: {done.stderr[-300:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    cases = [
        (draft, path.stem, case)
        for draft in DRAFTS
        for path in sorted(folder.glob(f"jsonschema-*/json/tests/{draft}/*.json"))
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]
    assert len(cases) > 500
    return cases


def accepts(backend, spec, text):
    """Return whether a text is a complete output of the grammar."""
    matcher = backend.compile(spec)
    tokens = [*text.encode("utf-8", "surrogatepass"), ByteTokenizer.EOS]
    return matcher.accept(tokens) == len(tokens)


def test_no_accepted_schema_of_the_suite_permits_an_invalid_value(suite):
    tokenizer = ByteTokenizer()
    backend = LLGuidance(GrammarContext(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size))
    invalid, checked, compiled = [], 0, set()
    for draft, keyword, case in suite:
        spec = GrammarSpec(
            form="json_schema",
            text=json.dumps(case["schema"]),
            stop_token_ids=frozenset({ByteTokenizer.EOS}),
        )
        try:
            backend.compile(spec)
        except RequestError:
            continue  # a rejected schema permits nothing
        compiled.add(keyword)
        for item in case["tests"]:
            texts = [json.dumps(item["data"], separators=pair) for pair in SEPARATORS]
            checked += 1
            if not item["valid"] and any(accepts(backend, spec, text) for text in texts):
                invalid.append((draft, keyword, case["description"], item["description"]))
    assert not invalid
    assert checked > 1000 and compiled >= CLAIMED
