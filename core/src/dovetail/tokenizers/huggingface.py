"""Tokenizers in the Hugging Face format: tokenizer.json and related small files.

This module reads `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
`chat_template.jinja`, `additional_chat_templates/`, and `generation_config.json` and `config.json`
for the EOS token id. Code in the directory is never run, vocabulary files in other formats are not
supported, and decoded text is not changed (`clean_up_tokenization_spaces` is ignored).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from dovetail.errors import ModelError, RequestError
from dovetail.interfaces.tokenizer import Tokenizer, TokenPieces
from dovetail.model_files import (
    MAX_TEMPLATE_BYTES,
    MIB,
    file_exists,
    list_model_files,
    read_json_object,
    read_model_file,
    read_model_text,
)
from dovetail.sandbox.child import ChildLimits
from dovetail.tokenizers.core_building import (
    PanicGuard,
    count_ids,
    load_core,
    prepare_core,
    unencodable,
)
from dovetail.tokenizers.template_renderer import TemplateRenderer
from dovetail.tokenizers.tokenizer_trial import try_tokenizer
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    import tokenizers

TOKEN_SUFFIX = "_token"
MAX_ADDITIONAL_TEMPLATES = 64
LONG_TEXT_CHARS = 4096
"""Strings longer than this are tokenized without holding the GIL."""
MAX_ADDED_TOKENS = 100_000
MAX_SPECIAL_TOKENS = 1024
_REMEDY = (
    "Create a valid tokenizer.json with `transformers`: "
    "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)."
)


class HuggingFaceOptions(BaseModel):
    """Options of the tokenizer plugin `huggingface`.

    template_timeout_s: wall time limit for rendering a conversation. template_memory_mib: address
    space of the process that renders it. tokenizer_timeout_s, tokenizer_memory_mib: limits of the
    process that tests tokenizer.json.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    template_timeout_s: float = Field(default=2.0, gt=0, le=3600)
    template_memory_mib: int = Field(default=256, ge=128, le=1 << 20)
    tokenizer_timeout_s: float = Field(default=60.0, gt=0, le=3600)
    tokenizer_memory_mib: int = Field(default=2048, ge=128, le=1 << 20)


DEFAULT_OPTIONS = HuggingFaceOptions()


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """The settings of a tokenizer in files of the model directory other than tokenizer.json.

    special_tokens: the strings by name, such as "eos_token" to "</s>"; variables of chat templates.
    eos_token_id: from generation_config.json or config.json, or None.
    add_bos_token, add_eos_token: whether `encode` adds them; None: as tokenizer.json states.
    chat_templates: name to source, such as "default".
    added_tokens: entries of `added_tokens_decoder`, by id. vocab_size: largest id plus 1, or None.
    """

    special_tokens: Mapping[str, str]
    eos_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    chat_templates: Mapping[str, str]
    added_tokens: tuple[Mapping[str, Any], ...]
    vocab_size: int | None = None

    @classmethod
    def read(cls, path: Path) -> TokenizerFacts:
        """Read the existing files in the directory `path`. Raise ModelError if one is invalid."""
        config = _read_json(path / "tokenizer_config.json")
        tokens = {**_token_texts(_read_json(path / "special_tokens_map.json"))}
        tokens |= _token_texts(config)
        if len(tokens) > MAX_SPECIAL_TOKENS:
            raise ModelError(
                f"{path / 'tokenizer_config.json'} and special_tokens_map.json name {len(tokens)} "
                f'special tokens ("..._token"); at most {MAX_SPECIAL_TOKENS} are allowed.'
            )
        added = config.get("added_tokens_decoder")
        added = added if isinstance(added, dict) else {}
        if len(added) > MAX_ADDED_TOKENS:
            raise ModelError(
                f"{path / 'tokenizer_config.json'}: added_tokens_decoder has {len(added)} entries; "
                f"at most {MAX_ADDED_TOKENS} are allowed. Move them to the model's vocabulary."
            )
        return cls(
            special_tokens=tokens,
            eos_token_id=_eos_token_id(path),
            add_bos_token=_optional_bool(config.get("add_bos_token")),
            add_eos_token=_optional_bool(config.get("add_eos_token")),
            chat_templates=_chat_templates(path, config.get("chat_template")),
            added_tokens=tuple(
                entry
                for _, entry in sorted(added.items(), key=lambda item: _id_number(path, item[0]))
                if isinstance(entry, dict) and isinstance(entry.get("content"), str)
            ),
        )


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that the `tokenizers` library has loaded from a tokenizer.json."""

    options_model: ClassVar[type[BaseModel]] = HuggingFaceOptions

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        info: TokenizerFacts,
        options: HuggingFaceOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Take over `core`: disable padding and truncation, and add missing special tokens."""
        prepare_core(core, info.added_tokens, info.special_tokens.values())
        self._core, self._guarded, self._facts = core, PanicGuard(core), info
        self._vocab_size = count_ids(core) if info.vocab_size is None else info.vocab_size
        added = core.get_added_tokens_decoder()
        self._special_token_ids = frozenset(i for i, token in added.items() if token.special)
        eos = self._id_of("eos_token")
        self._eos_token_id = info.eos_token_id if eos is None else eos
        self._around = self._forced_environment()
        self._pieces: dict[bool, TokenPieces | None] = {}
        self._renderer = TemplateRenderer(
            ChildLimits(
                timeout_s=options.template_timeout_s,
                memory_bytes=options.template_memory_mib * MIB,
            )
        )

    @classmethod
    def from_directory(cls, path: Path, options: Mapping[str, Any] | None = None) -> Self:
        """Load from a model directory. Raise ModelError, naming the file, on failure.

        options: the fields of `HuggingFaceOptions`.
        """
        file = Path(path) / "tokenizer.json"
        if not file_exists(file):
            raise ModelError(f"{file} is missing. {_REMEDY}")
        content, info = read_model_file(file), TokenizerFacts.read(Path(path))
        try:
            return cls.from_content(file, content, info, options)
        except ModelError as error:
            raise ModelError(f"{error} Copy the file again. {_REMEDY}") from None

    @classmethod
    def from_content(
        cls,
        file: Path,
        content: bytes | Mapping[str, Any],
        info: TokenizerFacts,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load the content of a tokenizer.json. Raise ModelError, naming `file`, on failure.

        file: the origin of `content`. content: see `load_core`. options: see `HuggingFaceOptions`.
        """
        parsed = HuggingFaceOptions(**(options or {}))
        special = list(info.special_tokens.values())
        limits = ChildLimits(
            timeout_s=parsed.tokenizer_timeout_s, memory_bytes=parsed.tokenizer_memory_mib * MIB
        )
        try_tokenizer(file, content, info.added_tokens, special, limits)
        return cls(load_core(content), info, parsed)

    @property
    def vocab_size(self) -> int:
        """The largest id plus 1, added tokens included."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, or None."""
        return self._eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` omits with `skip_special_tokens`."""
        return self._special_token_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The strings of named special tokens, such as "eos_token" to "</s>"."""
        return self._facts.special_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of the model's chat templates by name, such as "default"."""
        return self._facts.chat_templates

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. Raise RequestError if it is not valid Unicode."""
        around = self._around if add_special_tokens else None
        with_own = add_special_tokens and around is None
        try:
            if len(text) > LONG_TEXT_CHARS:
                # Unlike `encode`, this call lets other threads run.
                (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=with_own)
            else:
                encoding = self._core.encode(text, add_special_tokens=with_own)
            ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                "the text cannot be encoded: it must be a str without lone surrogates.",
                parameter="prompt",
            ) from error
        except BaseException as error:  # the library raises Exception or panics
            raise unencodable(error) from None
        return ids if around is None else [*around[0], *ids, *around[1]]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the ids of two texts as tokenizer.json joins them, and where type 1 starts."""
        try:
            (encoding,) = self._core.encode_batch([(first, second)])
        except BaseException as error:  # the library raises Exception or panics
            raise unencodable(error) from None
        types: list[int] = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`. Unknown ids are ignored.

        A sequence that makes the library panic becomes U+FFFD, like bytes that are not UTF-8.
        """
        return self._guarded.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_pieces(self, *, skip_special_tokens: bool) -> TokenPieces | None:
        """Return the text of each single token, or None if strings depend on neighboring tokens."""
        from dovetail.tokenizers.token_pieces import make_token_pieces

        if skip_special_tokens not in self._pieces:
            skipped = self._special_token_ids if skip_special_tokens else frozenset()
            self._pieces[skip_special_tokens] = make_token_pieces(self._guarded, skipped)
        return self._pieces[skip_special_tokens]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render a conversation to the prompt text in a child process with limits.

        messages: mappings with "role" and "content". chat_template: a template, or the name of a
        template of the model. Default: the model's template "tool_use" if it exists and tools are
        given, otherwise "default". variables: additional variables of the template, as JSON values.
        Blocks for at most `template_timeout_s`. Raises RequestError on failure.
        """
        source = self._choose_template(chat_template, bool(variables.get("tools")))
        known = {**self._facts.special_tokens, "add_generation_prompt": add_generation_prompt}
        return self._renderer.render(source, messages, {**known, **variables})

    def _choose_template(self, requested: str | None, with_tools: bool) -> str:
        own = self._facts.chat_templates
        if isinstance(requested, str):
            return own.get(requested, requested)
        if requested is not None:
            raise RequestError(
                f"chat_template must be a string, not {type(requested).__name__}.",
                parameter="chat_template",
            )
        if with_tools and "tool_use" in own:
            return own["tool_use"]
        if "default" in own:
            return own["default"]
        named = f" The model has templates named {shorten(sorted(own))}." if own else ""
        raise RequestError(
            f"the model has no default chat template.{named} Set chat_template, or send a prompt.",
            parameter="chat_template",
        )

    def _id_of(self, name: str) -> int | None:
        text = self._facts.special_tokens.get(name)
        token_id: int | None = None if text is None else self._core.token_to_id(text)
        return token_id

    def _forced_environment(self) -> tuple[list[int], list[int]] | None:
        """Return the BOS and EOS ids to add before and after a text.

        Returns None if tokenizer.json adds them as the configuration requires.
        """
        bos, eos = self._id_of("bos_token"), self._id_of("eos_token")
        own: list[int] = self._core.encode("").ids
        wants_bos, wants_eos = self._facts.add_bos_token, self._facts.add_eos_token
        has_bos, has_eos = own[:1] == [bos], own[-1:] == [eos] and (len(own) > 1 or eos != bos)
        bos_agrees = wants_bos is None or bos is None or wants_bos == has_bos
        eos_agrees = wants_eos is None or eos is None or wants_eos == has_eos
        if bos_agrees and eos_agrees:
            return None
        before = [bos] if bos is not None and (has_bos if wants_bos is None else wants_bos) else []
        after = [eos] if eos is not None and (has_eos if wants_eos is None else wants_eos) else []
        return before, after


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`, or an empty dict if the file does not exist."""
    return read_json_object(file) if file_exists(file) else {}


def _token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the name and text of each "…_token" entry, which is a string or an object."""
    texts = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith(TOKEN_SUFFIX) and isinstance(value, str):
            texts[name] = value
    return texts


def _id_number(path: Path, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ModelError(
            f"{path / 'tokenizer_config.json'}: added_tokens_decoder has the key "
            f"{shorten(text)}, which "
            "is not a token id. Copy the file again."
        ) from None


def _optional_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _eos_token_id(path: Path) -> int | None:
    for name in ("generation_config.json", "config.json"):
        token_ids = _read_json(path / name).get("eos_token_id")
        first = token_ids[0] if isinstance(token_ids, list) and token_ids else token_ids
        if isinstance(first, int) and not isinstance(first, bool):
            return first
    return None


def _chat_templates(path: Path, configured: object) -> dict[str, str]:
    """Return the name and source of each template. Template files override the config's entry."""
    templates = _configured_templates(path / "tokenizer_config.json", configured)
    files = {"default": path / "chat_template.jinja"}
    folder = path / "additional_chat_templates"
    more = list_model_files(folder, ".jinja", at_most=MAX_ADDITIONAL_TEMPLATES)
    files |= {file.stem: file for file in more}
    for name, file in files.items():
        if file_exists(file):
            templates[name] = read_model_text(file, max_bytes=MAX_TEMPLATE_BYTES)
    return templates


def _configured_templates(file: Path, configured: object) -> dict[str, str]:
    """Return the name and source of each template. configured: a string, list or mapping."""
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, dict):
        entries: list[Any] = [{"name": name, "template": text} for name, text in configured.items()]
    else:
        entries = configured if isinstance(configured, list) else [configured]
    if len(entries) > MAX_ADDITIONAL_TEMPLATES:
        raise ModelError(
            f"{file}: chat_template has {len(entries)} templates; at most "
            f"{MAX_ADDITIONAL_TEMPLATES} are allowed."
        )
    templates: dict[str, str] = {}
    for entry in entries:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelError(
                f"{file}: chat_template has {shorten(entry)}; it must be a string, or a list of "
                'objects with the strings "name" and "template". Copy the file again.'
            )
        templates[name] = text
    return templates
