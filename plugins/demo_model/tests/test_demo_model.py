"""Tests of the included demo models: sizes, tokenizer, chat template, held-out data, grading,
accuracy."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from random import Random

import pytest

from dovetail.interfaces import ModelSourceContext
from dovetail_demo_model import draft_dir, embedding_dir, model_dir
from dovetail_demo_model.tasks import TASKS, held_out_set
from dovetail_demo_model.vocabulary import NOUNS

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors")

TRAINING = Path(__file__).parents[1] / "training"
FOLDERS = {"main": (model_dir(), 6_000_000, 12e6), "draft": (draft_dir(), 1_000_000, 2e6)}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 27 + 58?"},
    {"role": "assistant", "content": "27 + 58 = 85."},
    {"role": "user", "content": "Spell planet."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def training_modules(monkeypatch):
    """Make the training scripts importable in a test and remove their modules afterwards."""
    names = {path.stem for path in TRAINING.glob("*.py")}
    monkeypatch.syspath_prepend(str(TRAINING))
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("size", FOLDERS)
def test_weights_are_finite_and_within_the_size_limits(size):
    folder, max_parameters, max_bytes = FOLDERS[size]
    path = folder / "model.safetensors"
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert sum(tensor.numel() for tensor in tensors) <= max_parameters
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
    assert path.stat().st_size <= max_bytes


@pytest.mark.parametrize("size", FOLDERS)
def test_configs_describe_a_llama_with_an_end_token(size, tokenizer):
    folder = FOLDERS[size][0]
    config = json.loads((folder / "config.json").read_text())
    generation = json.loads((folder / "generation_config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == tokenizer.get_vocab_size() <= 2048
    assert config["eos_token_id"] == tokenizer.token_to_id("<|eos|>")
    assert generation["eos_token_id"] == config["eos_token_id"]
    assert generation["do_sample"] is False


def test_each_model_source_provides_the_directory_of_its_model():
    project = tomllib.loads((TRAINING.parent / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["dovetail.model_source"]
    context = ModelSourceContext(cache_dir=Path("unused"))
    sources = {name: EntryPoint(name, value, "").load()(context) for name, value in points.items()}
    folders = {name: source.fetch("") for name, source in sources.items()}
    assert folders == {
        "demo": model_dir(),
        "demo-draft": draft_dir(),
        "demo-embedding": embedding_dir(),
    }


def test_the_demo_model_and_its_draft_have_the_same_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model_dir() / name).read_bytes() == (draft_dir() / name).read_bytes()


def test_the_tokenizer_has_one_token_for_each_noun_and_each_digit(tokenizer):
    long_tokens = [token for token in tokenizer.get_vocab() if len(token) > 3]
    assert len(long_tokens) > 800
    for noun in NOUNS:
        assert len(tokenizer.encode(" " + noun, add_special_tokens=False).ids) == 1
    assert len(tokenizer.encode("2026", add_special_tokens=False).ids) == 4


@pytest.mark.parametrize(
    "text",
    ["plain words", "naïve café", "日本語 🙂 Ω", "a\tb\n\n c", "\x00\x7f", " lead 12 trail "],
)
def test_decoding_an_encoded_text_returns_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_encoding_adds_one_bos_token(tokenizer):
    bos = tokenizer.token_to_id("<|bos|>")
    assert tokenizer.encode("What is 1 + 1?").ids.count(bos) == 1


def test_the_chat_template_gives_the_token_ids_of_the_training_data(tokenizer, training_modules):
    transformers = pytest.importorskip("transformers")
    from conversations import Conversation
    from tokenizer import ConversationEncoder

    loaded = transformers.AutoTokenizer.from_pretrained(model_dir())
    text = loaded.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be brief.<|end|><|user|>What is 27 + 58?<|end|>"
        "<|assistant|>27 + 58 = 85.<|eos|><|user|>Spell planet.<|end|><|assistant|>"
    )
    turns = (("What is 27 + 58?", "27 + 58 = 85."), ("Spell planet.", "planet: p l a n e t."))
    conversation = Conversation(system="Be brief.", turns=turns)
    ids, mask = ConversationEncoder(tokenizer).encode(conversation)
    rendered = tokenizer.encode(text, add_special_tokens=False).ids
    assert loaded(text, add_special_tokens=False).input_ids == rendered
    assert ids[: len(rendered)] == rendered
    learned = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert learned == "27 + 58 = 85.planet: p l a n e t."


@pytest.mark.costly
def test_no_held_out_question_is_sampled_for_training():
    held_out = {
        hashlib.sha256(prompt.encode()).digest()
        for task in TASKS.values()
        for prompt, _ in held_out_set(task, 200, seed=2026)
    }
    assert len(held_out) == 2000
    rng = Random(5)
    tasks = list(TASKS.values())
    trained = {
        hashlib.sha256(tasks[i % 10].draw(rng, held_out=False)[0].encode()).digest()
        for i in range(50_000)
    }
    assert len(trained) > 25_000
    assert not held_out & trained


@pytest.mark.costly
def test_training_conversations_contain_no_held_out_question(training_modules):
    from conversations import draw_conversation

    rng = Random(9)
    weights = dict.fromkeys(TASKS, 1.0)
    requested = {turn[0] for _ in range(3000) for turn in draw_conversation(rng, weights).turns}
    held_out = {p for task in TASKS.values() for p, _ in held_out_set(task, 200, seed=2026)}
    assert len(requested) > 3000
    assert not requested & held_out


@pytest.mark.parametrize("name", TASKS)
def test_graders_accept_correct_answers_and_reject_wrong_answers(name):
    task, rng = TASKS[name], Random(3)
    pairs = [task.make(rng) for _ in range(60)]
    for prompt, answer in pairs:
        assert task.check(prompt, answer)
        assert task.check(prompt, f" {answer}\n")
        assert not task.check(prompt, "")
        assert not task.check(prompt, "I do not know.")
    foreign = [
        task.check(prompt, other)
        for prompt, answer in pairs
        for _, other in pairs
        if other != answer
    ]
    assert sum(foreign) < 0.15 * len(foreign)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_deterministic_and_reject_other_prompts(name):
    task = TASKS[name]
    assert [task.make(Random(s)) for s in range(20)] == [task.make(Random(s)) for s in range(20)]
    with pytest.raises(ValueError, match="question"):
        task.check("Good morning", "85")


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "wrong"),
    [
        ("sum", "What is 27 + 58?", "27 + 58 = 85.", "27 + 58 = 86."),
        ("difference", "Subtract 5 from 12.", "12 - 5 = 7.", "5 - 12 = 7 or 8."),
        ("sort", "Sort: pear, apple, fig", "apple, fig, pear.", "fig, apple, pear."),
        ("reverse", "Reverse: a, b, c", "c, b, a.", "a, b, c."),
        ("spell", "Spell zebra.", "zebra: z e b r a.", "zebra: z e b a r."),
        ("count", "Count: cow, bed, cow", "There are 3 words.", "There are 4 words."),
        ("calendar", "3 days before Monday", "It was Friday.", "It was Thursday."),
        ("number_words", "Write 1017 in words.", "one thousand seventeen.", "one hundred."),
        ("units", "Convert 3 kilometers to meters.", "3 kilometers = 3000 meters.", "3000 feet"),
        ("json", "JSON: name Ada, age 3", '{"age": 3, "name": "Ada"}', '{"age": 3}'),
    ],
)
def test_graders_grade_the_example_answers_correctly(name, prompt, answer, wrong):
    assert TASKS[name].check(prompt, answer)
    assert not TASKS[name].check(prompt, wrong)


def _assert_accurate(results):
    rates = {name: result.accuracy for name, result in results.items()}
    print(rates)
    assert sum(rate >= 0.95 for rate in rates.values()) >= 0.8 * len(rates), rates
    assert min(rates.values()) >= 0.8, rates


@pytest.mark.costly
def test_the_model_answers_190_of_200_questions_correctly(training_modules):
    pytest.importorskip("transformers")
    from evaluate import evaluate

    results = evaluate(model_dir(), 20)
    right = sum(result.num_right for result in results.values())
    assert right >= 190, {name: result.wrong for name, result in results.items()}


@pytest.mark.slow
def test_the_model_is_accurate_on_every_task(training_modules):
    pytest.importorskip("transformers")
    from evaluate import evaluate

    _assert_accurate(evaluate(model_dir(), 200))


@pytest.mark.costly
def test_the_main_model_answers_a_greeting_and_both_models_stop(training_modules):
    pytest.importorskip("transformers")
    from evaluate import Answerer

    (text, ended), (_, small_ended) = (
        Answerer(folder).answer(["Hello"])[0] for folder in (model_dir(), draft_dir())
    )
    assert text.startswith("Hello!")
    assert ended
    assert small_ended
