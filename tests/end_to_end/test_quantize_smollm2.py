"""`dovetail quantize` on SmolLM2's GGUF file: the checkpoint has the tokenizer of the file."""

import pytest
from assets import fetch

from dovetail import LLM, SamplingParams
from dovetail_quantize.quantize_command import quantize
from dovetail_quantize.quantize_options import QuantizeOptions

pytestmark = pytest.mark.soak


def test_a_quantized_gguf_file_answers_in_words(tmp_path, capsys):
    (source,) = fetch("smollm2").glob("*.gguf")
    out = tmp_path / "out"
    assert quantize(str(source), options=QuantizeOptions(format="q4_1", out=out)) == 0
    assert "Saved to" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["model.gguf"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    question = [{"role": "user", "content": "Name the capital of France."}]
    with LLM(str(out), use_tqdm_on_load=False, max_model_len=512) as llm:
        (response,) = llm.chat([question], params, use_tqdm=False)
    assert "Paris" in response.outputs[0].text
