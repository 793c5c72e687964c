"""The sampling parameters of a request, and the bounds of each parameter.

The checks here do not depend on a model. The input processor checks and resolves values that need a
vocabulary or a tokenizer (ranges of token ids, stop strings, bad words as tokens).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from dovetail.errors import RequestError
from dovetail.value_checks import (
    check_flag,
    check_ids,
    check_integer,
    check_names,
    check_number,
    check_strings,
    check_text,
    guarded,
    invalid,
    plain_copy,
    take_ids,
    take_items,
    take_strings,
    with_known_names,
)

MAX_N = 1024
MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64
MAX_WORDS = 4096
MAX_TEXT_CHARS = 2**16
"""Maximum characters of a stop string or bad word; an engine's `LimitsConfig` may set less."""

MAX_TOKEN_IDS = 2**19
"""Maximum length of a list of token ids: more than any vocabulary has."""

MAX_BIAS = 100.0
MAX_EXTRA_ARGS_BYTES = 2**18
"""Maximum size of the serialized `extra_args`; an engine's `LimitsConfig` may set less."""

GREEDY_BELOW = 1e-5
"""With a lower temperature sampling is greedy, because dividing logits by it could overflow."""

MAX_GRAMMAR_CHARS = 2**18
"""Maximum length of a grammar in characters."""

MAX_MARKER_CHARS = 64
"""Maximum length in characters of a string that begins or ends the reasoning."""

GRAMMAR_FORMS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Maps each argument of `StructuredOutputsParams` to a form of grammar."""
MAX_CHOICES = 4096


@dataclass(frozen=True, kw_only=True, init=False)
class StructuredOutputsParams:
    """A grammar for the output of a request. Frozen, and checked at construction.

    Exactly one of the arguments of the constructor is given, or `form` and `text`. Raises
    RequestError, naming the argument.
    form: a form that the engine's grammar plugin supports, such as "json_schema" or "regex".
    text: the grammar.
    """

    form: str
    text: str

    def __init__(self, *, form: object = None, text: object = None, **params: object) -> None:
        """Accept the grammar in one of these arguments.

        json: a JSON schema as a mapping, as text or as a pydantic class. json_object: True, for any
        JSON object. regex: a regular expression. choice: a list of strings, of which the output is
        one. grammar: a context-free grammar (Lark, GBNF or EBNF). structural_tag: a mapping or
        text: free text that contains constrained parts.
        """
        params = {name: value for name, value in params.items() if value is not None}
        parameter = "structured_outputs"
        check_names(parameter, params, tuple(GRAMMAR_FORMS), prefix=f"{parameter}.")
        if len(params) + (form is not None or text is not None) != 1:
            names = ", ".join(params) or "none"
            raise RequestError(
                f"structured_outputs needs exactly one of {', '.join(GRAMMAR_FORMS)}, not {names}.",
                parameter=parameter,
            )
        for name, value in params.items():
            parameter, form = f"structured_outputs.{name}", GRAMMAR_FORMS[name]
            text = _grammar_text(parameter, name, value)
        checked = (
            form if params else check_text(f"{parameter}.form", form, max_chars=64, min_chars=1)
        )
        object.__setattr__(self, "form", checked)
        named = parameter if params else f"{parameter}.text"
        text = check_text(named, text, max_chars=MAX_GRAMMAR_CHARS, min_chars=1)
        object.__setattr__(self, "text", text)


@with_known_names
@dataclass(frozen=True, kw_only=True)
class ReasoningParams:
    """How the reasoning before an answer begins and ends. Frozen, and checked at construction.

    end: the text that ends it, such as "</think>". start: the text that begins it in the output; ""
    if the prompt contains it. Without this text the output is an answer from its first token.
    budget: maximum number of reasoning tokens, after which `end` is forced; None for no limit.
    Raises RequestError, naming the field.
    """

    end: str
    start: str = ""
    budget: int | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("end", 1), ("start", 0)):
            value = check_text(
                f"reasoning.{name}",
                getattr(self, name),
                max_chars=MAX_MARKER_CHARS,
                min_chars=minimum,
            )
            object.__setattr__(self, name, value)
        check_integer("reasoning.budget", self.budget, 0, MAX_TOKENS, optional=True)


@with_known_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request. Frozen, and checked at construction.

    n: number of completions, each with its own random numbers.
    temperature: 0 for greedy. top_k: 0 or -1 to disable. top_p, min_p: probabilities in [0, 1].
    presence_penalty, frequency_penalty: in [-2, 2], for generated tokens.
    repetition_penalty: > 0, for prompt and generated tokens; 1 to disable.
    seed: makes the tokens reproducible in any batch if all plugins are batch-invariant. Other
    plugins cause a warning at startup; `EngineArgs.batch_invariant` rejects them.
    stop: strings that end the text. stop_token_ids: tokens that end it. ignore_eos: continue after
        EOS.
    max_tokens: None for as many as the model's length allows. min_tokens: no stop before this.
    logprobs, prompt_logprobs: number of most likely tokens to return at each position, in addition
        to the token itself.
    logit_bias: token id to a bias in [-100, 100]. allowed_token_ids: only these may be sampled.
    bad_words: strings that must not be generated.
    truncate_prompt_tokens: keep only this many tokens from the end of the prompt.
    structured_outputs: a grammar for the output, or None. Needs a grammar plugin
        (`EngineArgs.grammar_backend`).
    reasoning: how the reasoning before the answer ends, or None. A grammar applies after it.
    extra_args: plain data for plugins (None, booleans, numbers, strings, bytes, lists, mappings),
        copied at construction; tuples become lists.
    Repeated token ids count once. `LimitsConfig` has the limits of an engine.
    Raises RequestError, naming the parameter, its value and its bounds.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    bad_words: tuple[str, ...] | list[str] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    reasoning: ReasoningParams | None = None
    extra_args: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.top_k) is int and self.top_k == -1:
            self._normalize("top_k", 0)
        self._check_numbers()
        for name in _FLOAT_FIELDS:
            value = getattr(self, name)
            if type(value) is not float:  # an int, or a subclass whose methods are not called
                self._normalize(name, check_number(name, value, -math.inf, math.inf))
        stop = take_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_TEXT_CHARS, allow_one=True)
        self._normalize("stop", stop)
        words = take_strings("bad_words", self.bad_words, MAX_WORDS, MAX_TEXT_CHARS)
        self._normalize("bad_words", words)
        stops = take_ids("stop_token_ids", self.stop_token_ids, MAX_TOKEN_IDS, MAX_TOKENS)
        self._normalize("stop_token_ids", stops or ())
        allowed = take_ids("allowed_token_ids", self.allowed_token_ids, MAX_TOKEN_IDS, MAX_TOKENS)
        if allowed == ():
            raise invalid("allowed_token_ids", self.allowed_token_ids, "None, or at least one id")
        self._normalize("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._normalize("logit_bias", _take_biases(self.logit_bias))
        self._normalize("extra_args", _take_extra_args(self.extra_args))
        if self.structured_outputs is not None:
            self._normalize("structured_outputs", _take_section(self.structured_outputs))
        if self.reasoning is not None:
            self._normalize("reasoning", _take_reasoning(self.reasoning))
        self._check_contradictions()

    def _normalize(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always selected."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        return self.stop or ()  # type: ignore[return-value]  # normalized at construction

    def validate(self) -> None:
        """Raise RequestError for the first invalid field. The engine calls it for each request."""
        self._check_numbers()
        self._check_lists()
        self._check_contradictions()

    def own_copy(self) -> SamplingParams:
        """Return equal parameters that other code cannot change.

        Returns `self` unless it has mappings or is of a subclass. Raises RequestError for values
        that became invalid after construction.
        """
        if type(self) is SamplingParams and not self.logit_bias and not self.extra_args:
            return self
        return guarded(
            "params",
            lambda: SamplingParams(**{key.name: getattr(self, key.name) for key in fields(self)}),
        )

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens.",
                parameter="min_tokens",
            )
        if self.structured_outputs is not None and self.ignore_eos and not self.stop_token_ids:
            raise RequestError(
                "structured_outputs needs a token that ends the text: omit ignore_eos, or set "
                "stop_token_ids.",
                parameter="structured_outputs",
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError(
                "stop strings need detokenize=True; set it, or use stop_token_ids.",
                parameter="stop",
            )

    def _check_numbers(self) -> None:
        check_integer("n", self.n, 1, MAX_N)
        check_integer("top_k", self.top_k, 0, MAX_TOKENS)
        check_integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS, optional=True)
        check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        check_integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        check_integer(
            "truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKENS, optional=True
        )
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        for name in _FLAG_FIELDS:
            check_flag(name, getattr(self, name))

    def _check_lists(self) -> None:
        check_strings("stop", self.stop_strings, MAX_STOP_STRINGS, MAX_TEXT_CHARS)
        check_strings("bad_words", self.bad_words or (), MAX_WORDS, MAX_TEXT_CHARS)
        check_ids("stop_token_ids", self.stop_token_ids or (), MAX_TOKENS)
        check_ids("allowed_token_ids", self.allowed_token_ids or (), MAX_TOKENS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise invalid("allowed_token_ids", self.allowed_token_ids, "None, or at least one id")
        if self.logit_bias is not None:
            _check_biases(self.logit_bias)
        if self.extra_args:
            _take_extra_args(self.extra_args)
        if self.structured_outputs is not None:
            _take_section(self.structured_outputs)
        if self.reasoning is not None:
            _take_reasoning(self.reasoning)


_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_FLAG_FIELDS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


def _take_section(section: object) -> StructuredOutputsParams:
    """Return a copy of the grammar parameters. Raise RequestError if they have a different type."""
    if not isinstance(section, StructuredOutputsParams):
        raise invalid("structured_outputs", section, "None or StructuredOutputsParams")
    return StructuredOutputsParams(form=section.form, text=section.text)


def _take_reasoning(section: object) -> ReasoningParams:
    if not isinstance(section, ReasoningParams):
        raise invalid("reasoning", section, "None or ReasoningParams")
    return ReasoningParams(end=section.end, start=section.start, budget=section.budget)


def _grammar_text(parameter: str, name: str, value: object) -> object:
    """Return a value as a string: JSON for data, and the schema of a pydantic class."""
    if name == "json_object":
        if value is not True:
            raise invalid(parameter, value, "True, or omit it")
        return "{}"
    if name in {"json", "structural_tag"} and not isinstance(value, str):
        schema_of = getattr(value, "model_json_schema", None) if isinstance(value, type) else None
        data = value if schema_of is None else guarded(parameter, schema_of)
        if not isinstance(data, Mapping):
            raise invalid(parameter, value, "a mapping, JSON text or a pydantic class")
    elif name == "choice":
        data = list(take_strings(parameter, value, MAX_CHOICES, MAX_TEXT_CHARS))
        if not data:
            raise invalid(parameter, value, "a list of strings that are not empty")
    else:
        return value
    return guarded(parameter, lambda: json.dumps(data, ensure_ascii=False))


def _take_biases(mapping: object) -> dict[int, float]:
    if not isinstance(mapping, Mapping):
        raise invalid("logit_bias", mapping, "a mapping from token id to number")
    if type(mapping) is dict and len(mapping) <= MAX_TOKEN_IDS:
        biases = mapping.copy()
    else:
        pairs = mapping.items() if type(mapping) is dict else guarded("logit_bias", mapping.items)
        taken = take_items("logit_bias", pairs, MAX_TOKEN_IDS, what="token ids")
        biases = guarded("logit_bias", lambda: dict(taken))
    _check_biases(biases)
    if set(map(type, biases.values())) <= {float}:
        return biases
    return {
        token: check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        for token, bias in biases.items()
    }


def _check_biases(biases: Mapping[int, float]) -> None:
    if not isinstance(biases, Mapping):
        raise invalid("logit_bias", biases, "a mapping from token id to number")
    if not biases:
        return
    check_ids("logit_bias", tuple(biases), MAX_TOKENS)
    values = tuple(biases.values())
    # Floats are checked together; a sum with a NaN is NaN.
    plain = set(map(type, values)) == {float} and not math.isnan(sum(values))
    if plain and min(values) >= -MAX_BIAS and max(values) <= MAX_BIAS:
        return
    for value in values:
        check_number("logit_bias", value, -MAX_BIAS, MAX_BIAS)


def _take_extra_args(extra_args: object) -> dict[str, object]:
    if extra_args is None:
        return {}
    if not isinstance(extra_args, Mapping):
        raise invalid("extra_args", extra_args, "a mapping from names to plain data")
    if type(extra_args) is dict and not extra_args:
        return {}
    copied: dict[str, object] = plain_copy("extra_args", extra_args, max_bytes=MAX_EXTRA_ARGS_BYTES)
    for key in copied:
        if not isinstance(key, str):
            raise RequestError(
                f"extra_args has the key {key!r}; its keys must be strings.",
                parameter="extra_args",
            )
    return copied
