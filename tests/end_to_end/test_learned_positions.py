"""A model with a learned position table: max_model_len above the size of the table is rejected at
startup."""

import json

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture
def start(tmp_path):
    def build(model, config=(), **options):
        stated = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 40, "hidden_size": 16}
        (tmp_path / "config.json").write_text(json.dumps(stated | dict(config)))
        overrides = {"architectures": [f"end_to_end.learned_positions:{model}"]}
        overrides |= options.pop("hf_overrides", {})
        return LLM(
            tmp_path,
            load_format="dummy",
            dtype="float32",
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            num_threads=1,
            max_num_seqs=4,
            hf_overrides=overrides,
            **options,
        )

    return build


def generate(llm):
    with llm:
        (output,) = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("model", ["Declared", "Undeclared"])
def test_the_position_table_of_config_json_limits_max_model_len_despite_overrides(start, model):
    config = {"n_positions": 24}
    assert len(generate(start(model, config))) == 21
    longer = {"max_position_embeddings": 64}
    assert len(generate(start(model, config, hf_overrides=longer))) == 21
    with pytest.raises(ConfigError, match=r"max_model_len=64 .* 24 tokens") as caught:
        start(model, config, max_model_len=64, hf_overrides=longer)
    assert "hf_overrides" not in str(caught.value)


def test_a_declared_position_table_limits_max_model_len(start):
    config = {"block_length": 24}
    assert len(generate(start("Declared", config))) == 21
    with pytest.raises(ConfigError, match="max_model_len=64 is more than the 24 positions"):
        start("Declared", config, max_model_len=64)


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": 64}])
def test_an_undeclared_position_table_is_found_at_startup(start, config):
    with pytest.raises(ConfigError, match=r"Undeclared fails at position (63|2047) .*lower"):
        start("Undeclared", {"block_length": 24, **config})
    llm = start("Undeclared", {"block_length": 24, **config}, max_model_len=24)
    assert len(generate(llm)) == 21
