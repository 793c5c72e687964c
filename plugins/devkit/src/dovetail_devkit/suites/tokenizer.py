"""The conformance suite of the tokenizer contract, for any tokenizer with its files.

Round trips check that a decoded text does not change when it is encoded and decoded again. Hostile
chat templates must be rejected or have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from dovetail.errors import ModelError, RequestError
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.expectation import checking, expect

TEXTS = (
    "",
    "Hello, world!",
    "  two  spaces and\ttabs\n\nand lines \n",
    "the café's naïve Zoë",
    "你好，世界 — 1234567890",
    "emoji 😀👩‍🚀 and ﬁ ligature",
    "def f(x):\n    return x ** 2  # code\n",
    "\x00\x07 control characters \x1b[0m",
)
MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Count to three."},
)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"

_MAX_BOMB_CHARS = 1 << 22
_HOSTILE = (
    ("{{ ''.__class__.__mro__ }}", "<class"),
    ("{{ messages.__class__.__base__.__subclasses__() }}", "<class"),
    ("{{ self.__init__.__globals__ }}", "builtins"),
    ("{% set f = ''.format %}{{ '{0.__class__}'.format(messages) }}", "<class"),
    ("{{ cycler.__init__.__globals__.os.getcwd() }}", "/"),
    ("{% include '/etc/passwd' %}", "root:"),
)
_BOMBS = (
    "{{ 'a' * 300000000 }}",
    "{% for i in range(300000000) %}{{ 'aaaaaaaaaa' }}{% endfor %}",
)


@checking("tokenizer")
def check_tokenizer(
    tokenizer_cls: type[Tokenizer], model_dir: Path, *, lossless: bool = False
) -> None:
    """Check a tokenizer against its contract. Raise AssertionError with the violated rule.

    model_dir: a directory with the tokenizer's files. lossless: whether `decode` must return every
    encoded text unchanged, as byte tokenizers do.
    """
    run_all(tokenizer_cases(tokenizer_cls, model_dir, lossless=lossless))


def tokenizer_cases(
    tokenizer_cls: type[Tokenizer], model_dir: Path, *, lossless: bool = False
) -> Iterator[Case]:
    """Yield the suite's cases. The arguments are the same as for `check_tokenizer`."""
    load = cache(lambda: tokenizer_cls.from_directory(model_dir))

    def check_loaded(check: Callable[[Tokenizer], None]) -> None:
        check(load())

    for name, check in _CHECKS.items():
        yield Case(name=name, run=partial(check_loaded, check))
    if lossless:
        yield Case(name="lossless round trips", run=partial(check_loaded, _check_lossless))
    yield Case(name="missing files", run=partial(_check_missing_files, tokenizer_cls))


def _check_numbers(tokenizer: Tokenizer) -> None:
    size, eos = tokenizer.vocab_size, tokenizer.eos_token_id
    expect(isinstance(size, int) and size > 1, f"vocab_size is {size!r}; expected an int above 1")
    expect(
        eos is None or 0 <= eos < size,
        f"eos_token_id is {eos!r}; it must be below vocab_size={size}",
    )
    special = tokenizer.special_token_ids
    expect(isinstance(special, frozenset), "special_token_ids must be a frozenset")
    expect(
        all(0 <= token < size for token in special),
        f"each of special_token_ids must be below vocab_size={size}",
    )


def _check_lossless(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        expect(back == text, f"the text {text!r} is encoded and decoded as {back!r}")


def _check_round_trips(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        expect(isinstance(ids, list), f"encode() returns a {type(ids).__name__}; expected a list")
        beyond = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
        expect(
            not beyond,
            f"encode({text!r}) returns the ids {beyond}, but vocab_size is {tokenizer.vocab_size}",
        )
        expect(
            tokenizer.encode(text, add_special_tokens=False) == ids,
            f"two calls of encode({text!r}) must return the same ids",
        )
        back = tokenizer.decode(ids)
        again = tokenizer.decode(tokenizer.encode(back, add_special_tokens=False))
        expect(
            again == back,
            f"encoding and decoding {back!r} gives {again!r}; a decoded text must not change",
        )
    _check_surrogate(tokenizer)


def _check_surrogate(tokenizer: Tokenizer) -> None:
    try:
        tokenizer.encode("half a pair: \ud83d")
    except RequestError:
        return
    except Exception as error:
        raise AssertionError(
            f"encode must raise RequestError for a text that is not valid Unicode; it raises "
            f"{error!r}"
        ) from error


def _check_any_ids(tokenizer: Tokenizer) -> None:
    size, rng = tokenizer.vocab_size, Random(3)
    ids = range(size) if size <= 4096 else rng.sample(range(size), 4096)
    for token in ids:
        text = tokenizer.decode([token])
        expect(isinstance(text, str), f"decode([{token}]) returns {text!r}; expected a str")
    for _ in range(50):
        tokens = [rng.randrange(size) for _ in range(12)]
        text = tokenizer.decode(tokens)
        text.encode("utf-8")
        expect(
            tokenizer.decode(tuple(tokens)) == text,
            "decode must return the same text for a list and a tuple of ids",
        )
    expect(tokenizer.decode([]) == "", "decode([]) must return an empty string")


def _check_special_tokens(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("plain text", add_special_tokens=False)
    special = sorted(tokenizer.special_token_ids)
    expect(
        not set(plain) & set(special),
        "encode with add_special_tokens=False must not add special tokens",
    )
    around = tokenizer.encode("plain text", add_special_tokens=True)
    bare = [token for token in around if token not in special]
    expect(bare == plain, "add_special_tokens must not change the ids of the text")
    skipped = tokenizer.decode([*special, *plain, *special], skip_special_tokens=True)
    expected = tokenizer.decode(plain, skip_special_tokens=True)
    expect(
        skipped == expected,
        f"decode with skip_special_tokens=True returns {skipped!r}; expected {expected!r}",
    )


def _check_pieces(tokenizer: Tokenizer) -> None:
    size, rng = tokenizer.vocab_size, Random(4)
    for skip in (False, True):
        pieces = tokenizer.token_pieces(skip_special_tokens=skip)
        if pieces is None:
            continue
        first = pieces.first or pieces.__getitem__
        for _ in range(50):
            tokens = [rng.randrange(size) for _ in range(12)]
            expected = tokenizer.decode(tokens, skip_special_tokens=skip)
            tokens = [token for token in tokens if pieces[token]]
            parts = [first(token) for token in tokens[:1]] + [pieces[token] for token in tokens[1:]]
            joined = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
            text = joined.decode("utf-8", "replace")
            expect(
                text == expected or "\ufffd" in expected,
                f"the joined pieces of {tokens} are the text {text!r}, but decode returns "
                f"{expected!r}",
            )


def _check_threads(tokenizer: Tokenizer) -> None:
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(max_workers=4) as threads:
        for actual in threads.map(lambda _: [tokenizer.encode(text) for text in TEXTS], range(8)):
            expect(actual == expected, "encode must return the same ids in concurrent threads")


def _check_templates(tokenizer: Tokenizer) -> None:
    messages = [dict(message) for message in MESSAGES]
    before = deepcopy(messages)
    text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE)
    for message in MESSAGES:
        for part in message.values():
            expect(
                part in text,
                f"apply_chat_template returns {text!r}; it must contain {part!r} of the messages",
            )
    expect(messages == before, "apply_chat_template must not change the messages")


def _check_hostile_templates(tokenizer: Tokenizer) -> None:
    messages = [dict(message) for message in MESSAGES]
    for template, evidence in _HOSTILE:
        text = _render(tokenizer, messages, template)
        expect(
            evidence not in text, f"the template {template!r} escaped the sandbox: {text[:200]!r}"
        )
    for template in _BOMBS:
        length = len(_render(tokenizer, messages, template))
        expect(
            length < _MAX_BOMB_CHARS,
            f"the template {template!r} wrote {length} characters; rendering must be stopped",
        )
    _render(tokenizer, messages, "{{ messages.append(messages[0]) }}{{ messages[0].clear() }}")
    expect(messages == [dict(m) for m in MESSAGES], "a template must not change the messages")
    for template in ("{% if %}", "{{ raise_exception('no') }}", "{{ nobody.knows.this }}"):
        _render(tokenizer, messages, template)


def _render(tokenizer: Tokenizer, messages: list[dict[str, str]], template: str) -> str:
    """Return the text of a template, or "" if `apply_chat_template` raises RequestError."""
    try:
        return tokenizer.apply_chat_template(messages, chat_template=template)
    except RequestError:
        return ""
    except Exception as error:
        raise AssertionError(
            f"apply_chat_template must raise RequestError for the template {template!r}; it raises "
            f"{error!r}"
        ) from error


def _check_missing_files(tokenizer_cls: type[Tokenizer]) -> None:
    with TemporaryDirectory() as folder:
        try:
            tokenizer_cls.from_directory(Path(folder))
        except ModelError as error:
            expect(
                folder in str(error),
                f"the ModelError must name the missing file; its message is: {error}",
            )
        except Exception as error:
            raise AssertionError(
                f"from_directory must raise ModelError for an empty directory; it raises {error!r}"
            ) from error


_CHECKS: Mapping[str, Callable[[Tokenizer], None]] = {
    "numbers": _check_numbers,
    "round trips": _check_round_trips,
    "any ids": _check_any_ids,
    "special tokens": _check_special_tokens,
    "pieces": _check_pieces,
    "threads": _check_threads,
    "chat templates": _check_templates,
    "hostile templates": _check_hostile_templates,
}
