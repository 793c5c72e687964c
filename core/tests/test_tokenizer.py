import json
import subprocess
import sys

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast

from dovetail.errors import ModelError, RequestError
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

TEXT = "The café's cat 😀 sat\n\n on 你好 <eos> mats."


@pytest.fixture
def directory(tmp_path):
    """A model directory with a byte-level tokenizer and its configuration files."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator([TEXT] * 3, trainer)
    core.add_tokens([AddedToken("<tool>", special=False)])
    core.save(str(tmp_path / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "<eos>"}
    write(tmp_path, "tokenizer_config.json", bos_token="<bos>", eos_token=eos)
    return tmp_path


def write(directory, name, **content):
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def with_bos(directory):
    core = Core.from_file(str(directory / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    core.save(str(directory / "tokenizer.json"))


def test_token_ids_and_text_equal_those_of_transformers(directory):
    with_bos(directory)
    tokenizer = HuggingFaceTokenizer.from_directory(directory)
    oracle = PreTrainedTokenizerFast.from_pretrained(directory)
    for special in (True, False):
        ids = oracle.encode(TEXT, add_special_tokens=special)
        assert tokenizer.encode(TEXT, add_special_tokens=special) == ids
        for skip in (True, False):
            text = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == text
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.eos_token_id == oracle.eos_token_id == 1
    assert tokenizer.special_token_ids == {0, 1}


def test_every_id_below_vocab_size_can_be_decoded(directory):
    tokenizer = HuggingFaceTokenizer.from_directory(directory)
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    assert texts[-1] == "<tool>"
    assert "\ufffd" in texts


@pytest.mark.parametrize("own_bos", [True, False])
@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_add_bos_token_and_add_eos_token_override_the_file(directory, own_bos, bos, eos):
    if own_bos:
        with_bos(directory)
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    flags = {name: value for name, value in flags.items() if value is not None}
    write(directory, "tokenizer_config.json", bos_token="<bos>", eos_token="<eos>", **flags)
    tokenizer = HuggingFaceTokenizer.from_directory(directory)
    bare = tokenizer.encode("cat", add_special_tokens=False)
    before = [0] if (own_bos if bos is None else bos) else []
    assert tokenizer.encode("cat") == [*before, *bare, *([1] if eos else [])]


def test_the_eos_token_is_read_from_every_file_that_can_define_it(directory):
    (directory / "tokenizer_config.json").unlink()
    assert HuggingFaceTokenizer.from_directory(directory).eos_token_id is None
    write(directory, "config.json", eos_token_id=5)
    assert HuggingFaceTokenizer.from_directory(directory).eos_token_id == 5
    write(directory, "generation_config.json", eos_token_id=[7, 8])
    assert HuggingFaceTokenizer.from_directory(directory).eos_token_id == 7
    write(
        directory, "special_tokens_map.json", eos_token={"__type": "AddedToken", "content": "<eos>"}
    )
    assert HuggingFaceTokenizer.from_directory(directory).eos_token_id == 1


def test_tokens_defined_only_in_the_config_are_added(directory):
    extra = {"content": "<|im_end|>", "special": True, "normalized": False}
    write(directory, "tokenizer_config.json", added_tokens_decoder={"999": extra})
    tokenizer = HuggingFaceTokenizer.from_directory(directory)
    (token,) = tokenizer.encode("<|im_end|>")
    assert token == tokenizer.vocab_size - 1
    assert token in tokenizer.special_token_ids


def test_padding_and_truncation_of_tokenizer_json_are_disabled(directory):
    core = Core.from_file(str(directory / "tokenizer.json"))
    core.enable_truncation(2)
    core.enable_padding(length=64)
    core.save(str(directory / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer.from_directory(directory)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "{"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("chat_template.jinja", "\udcff{"),
    ],
)
def test_the_error_for_an_invalid_tokenizer_file_names_file_and_remedy(directory, name, content):
    (directory / name).unlink(missing_ok=True)
    if content is not None:
        (directory / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError) as rejection:
        HuggingFaceTokenizer.from_directory(directory)
    assert str(directory / name) in str(rejection.value)
    assert ("transformers" in str(rejection.value)) == (name == "tokenizer.json")


def test_a_text_with_a_lone_surrogate_is_rejected(directory):
    for tokenizer in (HuggingFaceTokenizer.from_directory(directory), ByteTokenizer()):
        with pytest.raises(RequestError):
            tokenizer.encode("a\ud800")


TALK = [{"role": "user", "content": "hi"}]


def test_the_chat_template_is_found_in_every_file_that_can_contain_it(directory):
    def render(**variables):
        tokenizer = HuggingFaceTokenizer.from_directory(directory)
        return tokenizer.apply_chat_template(TALK, **variables)

    with pytest.raises(RequestError, match="no default chat template") as rejection:
        render()
    assert rejection.value.parameter == "chat_template"
    tokens = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
    write(directory, "tokenizer_config.json", chat_template="{{ bos_token }}", **tokens)
    assert render() == "<bos>"
    named = [
        {"name": "default", "template": "one {{ add_generation_prompt }} {{ eos_token }}"},
        {"name": "tool_use", "template": "two {{ tools }}"},
    ]
    write(directory, "tokenizer_config.json", chat_template=named, **tokens)
    assert render(add_generation_prompt=False) == "one False <eos>"
    assert render(tools=[1]) == "two [1]"
    assert render(chat_template="tool_use") == "two None"
    assert render(chat_template="{{ messages[0].content }} {{ x }}", x=3) == "hi 3"
    (directory / "chat_template.jinja").write_text("three")
    assert render() == "three"


def test_importing_the_tokenizer_modules_loads_no_tokenizer_library():
    program = "import sys\nimport dovetail.tokenizers.huggingface\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "dovetail.tokenizers.huggingface" in loaded
    assert not {"tokenizers", "jinja2", "transformers", "torch", "numpy"} & set(loaded)


def test_the_fake_tokenizer_meets_its_contract():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é") == [256, 0xC3, 0xA9]
    assert tokenizer.decode([256, 0xC3, 0xA9, 257]) == "<bos>é<eos>"
    assert tokenizer.decode([256, 0xC3, 0xA9, 257, 0xC3], skip_special_tokens=True) == "é\ufffd"
    assert tokenizer.special_token_ids < set(range(tokenizer.vocab_size))
    assert ByteTokenizer(add_bos=False).encode("a") == [97]
    assert tokenizer.apply_chat_template(TALK) == "user: hi\nassistant: "
