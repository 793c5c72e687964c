"""The text does not depend on the number of tokens per step, for all kinds of tokenizers."""

from array import array
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dovetail.clock import ManualClock
from dovetail.engine.output.detokenizer import (
    WINDOW_TOKENS,
    PieceDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished
from dovetail.outputs import RequestOutputKind
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer, TokenizerFacts
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

REPLACEMENT = "\ufffd"
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Straße, café, naïve; Ελληνικά, русский язык, 你好世界, 日本語, 한국어.",
    "Emoji: 😀👍🏽👩‍👩‍👧 and code: for i in range(10):\n    print(i)\n\n",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
FACTS = TokenizerFacts(
    special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    eos_token_id=None,
    add_bos_token=None,
    add_eos_token=None,
    chat_templates={},
    added_tokens=(),
)


def byte_level():
    """Return a tokenizer like those of GPT-2, Llama 3 and Qwen."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(TEXTS, trainer)
    return core


def byte_fallback(*, strip=True):
    """Return a tokenizer with metaspace and byte fallback, like that of Llama 2.

    strip: whether the decoder drops the first space; if False, the tokenizer is like Gemma's.
    """
    words = sorted({" " + word for word in TEXTS[0].replace(",", "").replace(".", "").split()})
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzT,.:"))
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = []
    for word in words:
        spelled = word.replace(" ", "▁")
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append((spelled[: end - 1], spelled[end - 1]))
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * strip)])
    core.add_special_tokens(SPECIAL)
    return core


def unigram():
    """Return a tokenizer like those of T5 and XLNet."""
    core = Core(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, special_tokens=SPECIAL, unk_token="<unk>"
    )
    core.train_from_iterator(TEXTS, trainer)
    return core


def word_piece():
    """Return a tokenizer like that of BERT."""
    core = Core(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, show_progress=False, special_tokens=SPECIAL)
    core.train_from_iterator(TEXTS, trainer)
    return core


def word_suffix():
    """Return a tokenizer like GPT-1's: a token has a space only if another token follows."""
    core = Core(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=200, show_progress=False, special_tokens=SPECIAL, end_of_word_suffix="</w>"
    )
    core.train_from_iterator(TEXTS, trainer)
    return core


class Unknown(HuggingFaceTokenizer):
    """A tokenizer without token pieces."""

    def token_pieces(self, *, skip_special_tokens):
        return None


SHAPES = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "byte_fallback_bare": byte_fallback(strip=False),
    "unigram": unigram(),
    "word_piece": word_piece(),
    "word_suffix": word_suffix(),
}
TOKENIZERS = {name: HuggingFaceTokenizer(core, FACTS) for name, core in SHAPES.items()}
TOKENIZERS |= {f"{name}, decode": Unknown(core, FACTS) for name, core in SHAPES.items()}
TOKENIZERS["bytes"] = ByteTokenizer()
LOSSLESS = ["byte_level", "byte_level, decode", "bytes"]
SPELLING = [name for name in sorted(TOKENIZERS) if name.startswith("byte")]
each_tokenizer = pytest.mark.parametrize("name", sorted(TOKENIZERS))
each_spelling = pytest.mark.parametrize("name", SPELLING)
sizes_of_steps = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def stream(tokenizer, prompt, output, sizes=(1,), skip=True):
    detokenizer = make_detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces, start, turn = [], 0, 0
    while start < len(output):
        end = start + sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(output[start:end]))
        start, turn = end, turn + 1
    return [*pieces, detokenizer.flush()]


def beyond(tokenizer, prompt, output, skip=True):
    """Return the expected text: the decoded sequence without the prompt's text."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    while not whole.startswith(before):
        assert before.endswith(REPLACEMENT)
        before = before[:-1]
    return whole[len(before) :]


def test_token_pieces_are_used_if_the_tokenizer_provides_them():
    for name, tokenizer in TOKENIZERS.items():
        has_pieces = "decode" not in name and name != "word_suffix"
        expected = PieceDetokenizer if has_pieces else WindowDetokenizer
        assert type(make_detokenizer(tokenizer)) is expected, name
        assert tokenizer.token_pieces(skip_special_tokens=True) is tokenizer.token_pieces(
            skip_special_tokens=True
        )


@pytest.mark.costly
@each_tokenizer
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), st.booleans(), sizes_of_steps)
def test_the_text_does_not_depend_on_the_number_of_tokens_per_step(name, data, skip, sizes):
    tokenizer = TOKENIZERS[name]
    tokens = st.integers(0, tokenizer.vocab_size - 1)
    if name.startswith("byte_fallback"):  # most of these tokens are partial characters
        tokens = st.one_of(st.integers(3, 258), tokens)
    prompt = data.draw(st.lists(tokens, max_size=10))
    output = data.draw(st.lists(tokens, max_size=50))
    alone = "".join(stream(tokenizer, prompt, output, skip=skip))
    assert "".join(stream(tokenizer, prompt, output, sizes, skip)) == alone
    assert "".join(stream(tokenizer, prompt, output, (100,), skip)) == alone
    if name in LOSSLESS:
        assert alone == beyond(tokenizer, prompt, output, skip)
    # With other tokenizers an invalid byte also affects adjacent valid characters.
    texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in (prompt, prompt + output)]
    if not any(REPLACEMENT in text for text in texts) and "suffix" not in name:
        assert alone == beyond(tokenizer, prompt, output, skip)


@pytest.mark.costly
@each_spelling
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.text("abc xyz the,.\n é你😀", max_size=12),
    st.text("abc xyz the,.\n é你😀́", max_size=60),
    st.integers(0, 20),
    sizes_of_steps,
)
def test_the_output_text_is_complete_wherever_the_prompt_ends(name, before, after, cut, sizes):
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(before + after, add_special_tokens=False)
    prompt, output = tokens[:cut], tokens[cut:]
    pieces = stream(tokenizer, prompt, output, sizes)
    assert not any(REPLACEMENT in piece for piece in pieces)
    if name in LOSSLESS:
        assert "".join(pieces) == beyond(tokenizer, prompt, output)
        return
    while REPLACEMENT in (known := tokenizer.decode(prompt)):
        prompt = prompt[:-1]  # one invalid byte affects all preceding characters
    whole = tokenizer.decode(tokens)
    assert "".join(pieces) == (whole.removeprefix(known) if output else "")


@each_spelling
def test_a_complete_character_is_returned_immediately(name):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("the")
    output = tokenizer.encode("the 👩‍👩‍👧 日本")[len(prompt) :]
    pieces = [piece for piece in stream(tokenizer, prompt, output) if piece]
    assert "".join(pieces) == " 👩‍👩‍👧 日本"
    assert "👩" in "".join(pieces[:3])


@pytest.mark.parametrize("name", ["byte_fallback", "byte_fallback, decode", "unigram"])
def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_a_prompt(name):
    tokenizer = TOKENIZERS[name]
    fox = tokenizer.encode("fox")
    brown = tokenizer.encode("brown")
    assert tokenizer.decode(fox) == "fox"
    assert "".join(stream(tokenizer, brown, fox)) == " fox"
    assert "".join(stream(tokenizer, [], fox)) == "fox"
    # Special tokens at the prompt's end are skipped; the tokens before them are the context.
    eos = tokenizer.eos_token_id
    assert "".join(stream(tokenizer, [*brown, eos, eos], fox)) == " fox"
    assert "".join(stream(tokenizer, [eos], fox)) == "fox"


@pytest.mark.parametrize("skip", [True, False])
@each_spelling
def test_special_tokens_are_skipped_unless_requested(name, skip):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("dog")
    output = [*tokenizer.encode("the"), tokenizer.eos_token_id, *tokenizer.encode("你")]
    pieces = stream(tokenizer, prompt, output, skip=skip)
    assert "".join(pieces) == beyond(tokenizer, prompt, output, skip)
    assert (tokenizer.decode([tokenizer.eos_token_id]) in "".join(pieces)) is not skip


@each_spelling
def test_a_character_that_begins_in_the_prompt_is_part_of_the_output(name):
    tokenizer = TOKENIZERS[name]
    more = [t for t in range(tokenizer.vocab_size) if tokenizer.decode([t, t]) == "aa"][-1:]
    for text in ("dog你你你é", "é", "dog😀"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        prompt, output = tokens[:-1], tokens[-1:]
        assert "".join(stream(tokenizer, prompt, [*output, *more])) == f"{text[-1]}a"
        assert "".join(stream(tokenizer, prompt, output)) == text[-1]
        assert "".join(stream(tokenizer, prompt, [])) == ""
        assert "".join(stream(tokenizer, prompt, more)) == "a"


def test_flushing_the_detokenizer_returns_a_partial_character():
    pieces = stream(ByteTokenizer(), list(b"x"), list("aé".encode())[:-1])
    assert pieces == ["a", "", REPLACEMENT]


def test_valid_characters_next_to_invalid_bytes_stay_valid():
    tokenizer = TOKENIZERS["byte_fallback"]
    prompt = tokenizer.encode("dog")
    you = tokenizer.encode("你")[-3:]
    broken = you[:2]
    for sizes in ((1,), (2,), (3,), (100,)):
        text = "".join(stream(tokenizer, prompt, [*you, *broken, *you, *broken], sizes))
        assert text == f"你{REPLACEMENT * 2}你{REPLACEMENT * 2}"


@pytest.mark.parametrize("name", ["bytes", "byte_level, decode"])
def test_invalid_bytes_are_returned_after_a_limited_number_of_tokens(name):
    tokenizer = TOKENIZERS[name]
    lone = next(t for t in range(tokenizer.vocab_size) if tokenizer.decode([t]) == REPLACEMENT)
    detokenizer = make_detokenizer(tokenizer, tokenizer.encode("x"))
    text = ""
    for number in range(1, 200):
        text += detokenizer.push([lone])
        assert len(text) >= number - 10
    text += detokenizer.push(tokenizer.encode("é", add_special_tokens=False)) + detokenizer.flush()
    assert text == REPLACEMENT * 199 + "é"


@pytest.mark.parametrize("token", [ord("a"), 0xFF])
def test_the_cost_of_a_token_does_not_depend_on_the_text_length(token):
    lengths = []

    class Counting(ByteTokenizer):
        def token_pieces(self, *, skip_special_tokens):
            return None

        def decode(self, token_ids, *, skip_special_tokens=False):
            lengths.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = make_detokenizer(Counting(), list(b"prompt" * 1000))
    for _ in range(1000):
        detokenizer.push([token])
    assert max(lengths) <= 2 * WINDOW_TOKENS
    assert len(lengths) <= 1200


def run_kind(tokenizer, request, kind, output, sizes, ended):
    """Run a request with one output kind. Return text, tokens, logprobs and the final fields."""
    processor = OutputProcessor(tokenizer, clock=ManualClock(1))
    processor.add_request("r", [request], kind=kind)
    collected, start, turn = [], 0, 0
    while start < len(output) and processor.num_unfinished:
        tokens = output[start : start + sizes[turn % len(sizes)]]
        start, turn = start + len(tokens), turn + 1
        logprobs = LogprobColumns(
            counts=array("i", [1] * len(tokens)),
            token_ids=array("i", tokens),
            logprobs=array("f", [-1.0] * len(tokens)),
            ranks=array("i", [1] * len(tokens)),
        )
        ending = (Finished(request_id="r", reason=ended),) if start >= len(output) else ()
        step = EngineCoreOutputs(
            request_ids=["r"],
            num_new_tokens=array("i", [len(tokens)]),
            token_ids=array("i", tokens),
            finished=ending,
            logprobs={"r": logprobs} if request.sampling_params.logprobs is not None else {},
        )
        collected += [
            request_output.outputs[0] for request_output in processor.process(step).request_outputs
        ]
    last = collected[-1]
    end = (last.finish_reason, last.stop_reason, last.cumulative_logprob)
    if kind is not RequestOutputKind.DELTA:
        return last.text, last.token_ids, last.logprobs, end
    logprobs = (
        None if last.logprobs is None else [here for item in collected for here in item.logprobs]
    )
    token_ids = [token for item in collected for token in item.token_ids]
    return "".join(item.text for item in collected), token_ids, logprobs, end


@pytest.mark.costly
@each_tokenizer
def test_every_output_kind_gives_the_same_text_for_any_number_of_tokens_per_step(name):
    tokenizer, random = TOKENIZERS[name], Random(name)
    spelled = tokenizer.encode(TEXTS[0] + TEXTS[1] + TEXTS[2])
    for _ in range(25):
        output = random.choices(range(tokenizer.vocab_size), k=40)
        if random.random() < 0.5:
            output[10:30] = spelled[(start := random.randrange(len(spelled))) : start + 20]
        prompt = output[: random.randrange(1, 8)]
        text = tokenizer.decode(output[len(prompt) :], skip_special_tokens=True)
        ended = random.choice([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
        params = SamplingParams(
            stop=random.choice([None, [text[9:11] or "x", "\n\n"], [text[20:25] or "y"]]),
            min_tokens=random.choice([0, 0, 12]),
            skip_special_tokens=random.random() < 0.5,
            include_stop_str_in_output=random.random() < 0.5,
            logprobs=random.choice([None, 0]),
            max_tokens=100,
        )
        request = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=prompt,
            sampling_params=params,
            max_tokens=100,
            stop_token_ids=frozenset({output[-1]}),
            seed=1,
        )
        outcomes = [
            run_kind(tokenizer, request, kind, output[len(prompt) :], sizes, ended)
            for kind in RequestOutputKind
            for sizes in ((1,), (2,), (3, 1, 5), (100,))
        ]
        assert all(outcome == outcomes[0] for outcome in outcomes), (outcomes, params)
        if params.logprobs is not None and name in ("bytes", "word_piece", "byte_fallback_bare"):
            texts = [here.decoded_token for row in outcomes[0][2] for here in row.values()]
            assert all(isinstance(text, str) for text in texts)
