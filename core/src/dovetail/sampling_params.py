"""What a user may ask of the tokens that follow a prompt, and the bounds of each wish.

Knows nothing of any one model: what needs a vocabulary or a tokenizer (token ids in range, stop
strings as text, bad words as tokens) is checked and resolved by the input processor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.errors import RequestError

MAX_N = 1024
MAX_TOKENS = 2**31 - 1
MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64
MAX_WORDS = 4096
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would leave no finite logits."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Frozen; checked when made.

    n: completions of the prompt, each with its own stream of random numbers.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p, min_p: probabilities in [0, 1].
    presence_penalty, frequency_penalty: in [-2, 2], on generated tokens.
    repetition_penalty: > 0, on prompt and generated tokens; 1 is off.
    seed: makes the request's tokens reproducible whatever else is in the batch.
    stop: strings that end the text; stop_token_ids: tokens that end it. ignore_eos: go on past EOS.
    max_tokens: None means as many as the model's length allows. min_tokens: no end before that.
    logprobs, prompt_logprobs: number of best tokens to report at each position, beside its own.
    logit_bias: token id to an addend in [-100, 100]. allowed_token_ids: nothing else may be chosen.
    bad_words: texts that may not be produced.
    truncate_prompt_tokens: keep only the last so many tokens of the prompt.
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
    extra_args: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (
            ("stop", stop),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            ("bad_words", self.bad_words),
        ):
            if value is not None and not isinstance(value, (list, tuple)):
                raise _refusal(name, value, "a list")
            if name != "allowed_token_ids":
                value = value or ()
            object.__setattr__(self, name, None if value is None else tuple(value))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        self.validate()

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return self.stop or ()  # type: ignore[return-value]  # normalised when made

    def validate(self) -> None:
        """Raise RequestError for the first field out of its bounds.

        Called when made, and once more by the engine, whatever front end the request came through.
        """
        self._check_numbers()
        self._check_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower the one or raise the other.",
                parameter="min_tokens",
            )
        if self.stop_strings and not self.detokenize:
            raise RequestError(
                "stop strings need the text: leave detokenize on, or use stop_token_ids.",
                parameter="stop",
            )

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("top_k", self.top_k, 0, MAX_TOKENS)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS, optional=True)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_int("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _check_int(
            "truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKENS, optional=True
        )
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)

    def _check_lists(self) -> None:
        _check_texts("stop", self.stop_strings, MAX_STOP_STRINGS)
        _check_texts("bad_words", self.bad_words or (), MAX_WORDS)
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token in ids or ():
                _check_int(name, token, 0, MAX_TOKENS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _refusal("allowed_token_ids", self.allowed_token_ids, "None, or at least one id")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise _refusal("logit_bias", self.logit_bias, "a mapping from token id to number")
        for token, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token, 0, MAX_TOKENS)
            _check_real("logit_bias", bias, -100.0, 100.0)


def _refusal(name: str, value: object, bounds: str) -> RequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RequestError(f"{name}={shown} must be {bounds}.", parameter=name)


def _check_int(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        also = "None or " if optional else ""
        raise _refusal(name, value, f"{also}an integer from {low} to {high}")


def _check_real(
    name: str, value: object, low: float, high: float, *, open_low: bool = False
) -> None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not math.isfinite(value):  # type: ignore[arg-type]  # real says so
        raise _refusal(name, value, "a finite number")
    if not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        above = f"above {low:g} and at most" if open_low else f"from {low:g} to"
        raise _refusal(name, value, f"{above} {high:g}")


def _check_texts(name: str, texts: tuple[str, ...] | list[str], most: int) -> None:
    if len(texts) > most:
        raise _refusal(name, texts, f"at most {most} strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _refusal(name, texts, "strings of at least one character")
