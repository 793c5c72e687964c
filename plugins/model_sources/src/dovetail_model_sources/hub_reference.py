"""References to a model on the hub, and the names of its files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from dovetail.errors import ConfigError, ModelError
from dovetail.value_checks import shorten

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    CARD_FILE,
)
"""Files that are downloaded if the repository has them, besides config.json and the weights."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 1000
DEFAULT_REVISION = "main"
DEFAULT_ENDPOINT = "https://huggingface.co"

_REFERENCE = re.compile(
    r"(?P<repo>(?:\w[\w.-]{0,95}/)?\w[\w.-]{0,95})"
    r"(?::(?P<file>\w[\w.+-]{0,199}\.gguf))?"
    r"(?:@(?P<revision>\w[\w.-]*(?:/\w[\w.-]*){0,7}))?",
    re.ASCII,
)
_MAX_CHARS = 500
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class HubReference:
    """A model on the hub. file: one GGUF file of the repository, or "" for a model directory."""

    repo: str
    file: str = ""
    revision: str = DEFAULT_REVISION

    @property
    def title(self) -> str:
        """The name of the model, without the revision if it is the default."""
        title = f"{self.repo}:{self.file}" if self.file else self.repo
        return title if self.revision == DEFAULT_REVISION else f"{title}@{self.revision}"

    @property
    def folder_name(self) -> str:
        """The name of the repository's directory in the cache."""
        return "--".join(("models", *self.repo.split("/")))

    def gguf_files(self) -> tuple[str, ...]:
        """Return the file, or all parts if it is one part of a split model."""
        part = _PART.fullmatch(self.file)
        if part is None:
            return (self.file,)
        count = int(part["count"])
        if not 1 <= int(part["number"]) <= count <= MAX_SHARDS:
            raise ModelError(f"{shorten(self.file)} is not the name of a part of a split model.")
        return tuple(
            f"{part['stem']}-{number:05}-of-{part['count']}.gguf" for number in range(1, count + 1)
        )


def parse_hub_reference(text: str) -> HubReference:
    """Parse "ORGANIZATION/NAME[:FILE.gguf][@REVISION]". Raise ModelError for any other text."""
    match = _REFERENCE.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None or "--" in match["repo"] or ".." in text:
        raise ModelError(
            f"{shorten(text)} is not the name of a model on the hub.\n"
            "Use ORGANIZATION/NAME, such as Qwen/Qwen3-0.6B, with :FILE.gguf for one GGUF file "
            "and @REVISION for a branch, tag or commit."
        )
    reference = HubReference(
        repo=match["repo"],
        file=match["file"] or "",
        revision=match["revision"] or DEFAULT_REVISION,
    )
    reference.gguf_files()
    return reference


def hub_endpoint() -> str:
    """Return the hub's address, without a slash at its end. Raise ConfigError if it is invalid."""
    stated = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT
    if not re.fullmatch(r"https?://[^\s/?#]+(?:/[^\s?#]*)?", stated):
        raise ConfigError(f"HF_ENDPOINT={shorten(stated)} must be an http or https address.")
    return stated
