import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dovetail.engine.detokenizer import WINDOW_TOKENS, Detokenizer, detokenize
from dovetail.testing.fake_tokenizer import ByteTokenizer
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer, TokenizerFacts

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Straße, café, naïve; Ελληνικά, русский язык, 你好世界, 日本語, 한국어.",
    "Emoji: 😀👍🏽👩‍👩‍👧 and code: for i in range(10):\n    print(i)\n\n",
] * 3
FACTS = TokenizerFacts(
    special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    eos_token_id=None,
    add_bos_token=None,
    add_eos_token=None,
    chat_templates={},
    added_tokens=(),
)


def byte_level():
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
    return HuggingFaceTokenizer(core, FACTS)


def byte_fallback():
    """A tokenizer as Llama's: metaspace, and bytes for what it does not know."""
    words = sorted({" " + word for word in TEXTS[0].replace(",", "").replace(".", "").split()})
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzT,.:"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = []
    for word in words:
        spelled = word.replace(" ", "▁")
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append((spelled[: end - 1], spelled[end - 1]))
    vocab = {token: place for place, token in enumerate(tokens)}
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return HuggingFaceTokenizer(core, FACTS)


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
each_tokenizer = pytest.mark.parametrize("name", sorted(TOKENIZERS))


def stream(tokenizer, prompt, output, sizes=(1,), skip=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    pieces, start, turn = [], 0, 0
    while start < len(output):
        end = start + sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(output[start:end]))
        start, turn = end, turn + 1
    return [*pieces, detokenizer.flush()]


def beyond(tokenizer, prompt, output, skip=True):
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


@each_tokenizer
@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.text("abc xyz the,.\n é你😀", max_size=12),
    st.text("abc xyz the,.\n é你😀́", max_size=60),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_pieces_of_text_are_the_whole_text(name, before, after, sizes):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode(before)
    output = tokenizer.encode(before + after)[len(prompt) :]
    prompt = tokenizer.encode(before + after)[: len(prompt)]
    if tokenizer.decode(prompt).endswith("\ufffd"):
        return  # the prompt ends inside a character
    pieces = stream(tokenizer, prompt, output, sizes)
    assert "".join(pieces) == beyond(tokenizer, prompt, output)
    assert "".join(pieces) == detokenize(tokenizer, prompt, output)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 399), max_size=80))
def test_any_tokens_at_all_give_what_decode_gives(output):
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("Once")
    text = "".join(stream(tokenizer, prompt, output))
    assert text == beyond(tokenizer, prompt, output)


@each_tokenizer
def test_without_a_prompt_it_is_decode(name):
    tokenizer = TOKENIZERS[name]
    output = tokenizer.encode(TEXTS[0] + TEXTS[1])
    assert "".join(stream(tokenizer, [], output)) == tokenizer.decode(output)


@each_tokenizer
def test_characters_are_whole_at_once(name):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("the")
    output = tokenizer.encode("the 👩‍👩‍👧 日本")[len(prompt) :]
    pieces = [piece for piece in stream(tokenizer, prompt, output) if piece]
    assert "".join(pieces) == " 👩‍👩‍👧 日本"
    assert "👩" in "".join(pieces[:3])


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without():
    tokenizer = TOKENIZERS["byte_fallback"]
    fox = tokenizer.encode("fox")
    assert tokenizer.decode(fox) == "fox"
    assert "".join(stream(tokenizer, tokenizer.encode("brown"), fox)) == " fox"
    assert "".join(stream(tokenizer, [], fox)) == "fox"
    # Special tokens at the prompt's end are no context; what stands before them is.
    eos = tokenizer.eos_token_id
    assert "".join(stream(tokenizer, [*tokenizer.encode("brown"), eos, eos], fox)) == " fox"


@pytest.mark.parametrize("skip", [True, False])
@each_tokenizer
def test_special_tokens_are_skipped_or_kept(name, skip):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("dog")
    output = [*tokenizer.encode("the"), tokenizer.eos_token_id, *tokenizer.encode("你")]
    pieces = stream(tokenizer, prompt, output, skip=skip)
    assert "".join(pieces) == beyond(tokenizer, prompt, output, skip)
    assert ("</s>" in "".join(pieces)) is not skip


def test_half_a_character_at_the_end_comes_out_with_flush():
    tokenizer = ByteTokenizer()
    pieces = stream(tokenizer, list(b"x"), list("aé".encode())[:-1])
    assert pieces == ["a", "", "\ufffd"]


def test_a_character_begun_in_the_prompt_spoils_nothing_after_it():
    tokenizer = ByteTokenizer()
    prompt, output = list(b"x\xe4\xbd"), [0xA0, *b"abc"]
    assert "".join(stream(tokenizer, prompt, output)) == "abc"
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("dog你你你你")
    assert "".join(stream(tokenizer, ids[:-3], ids[-3:])) == "你"


def test_broken_bytes_are_not_held_back_for_ever():
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer, list(b"x"))
    text = ""
    for number in range(1, 200):
        text += detokenizer.push([0xFF])
        assert len(text) >= number - 10
    text += detokenizer.push(list("é".encode())) + detokenizer.flush()
    assert text == "\ufffd" * 199 + "é"


@pytest.mark.parametrize("token", [ord("a"), 0xFF])
def test_a_token_costs_the_same_however_long_the_text_is(token):
    lengths = []

    class Counting(ByteTokenizer):
        def decode(self, token_ids, *, skip_special_tokens=False):
            lengths.append(len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting(), list(b"prompt" * 1000))
    for _ in range(1000):
        detokenizer.push([token])
    assert max(lengths) <= 2 * WINDOW_TOKENS
    assert len(lengths) <= 1200
