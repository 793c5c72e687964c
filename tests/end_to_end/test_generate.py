"""Generates outputs for prompts with the whole engine and a random model."""

from __future__ import annotations

import io
import random
import sys

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config import EngineArgs
from dovetail.engine.llm_engine import LLMEngine
from dovetail.errors import EngineDeadError, RequestError
from dovetail.outputs import RequestOutputKind
from end_to_end.checkpoints import OPTIONS, letters

PROMPT = "The quick brown fox"
LENGTH = 24


@pytest.fixture(scope="module")
def readable(llm):
    """Return a function that creates seeded parameters that allow only tokens of letters."""
    allowed = letters(llm.get_tokenizer())

    def make(**changes):
        fields = {"max_tokens": LENGTH, "seed": 11, "allowed_token_ids": allowed}
        return SamplingParams(**(fields | changes))

    return make


def answer(llm, prompt=PROMPT, **params):
    kwargs = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True} | params
    (output,) = llm.generate(prompt, SamplingParams(**kwargs))
    return output.outputs[0]


def greedy(**changes):
    return SamplingParams(**({"max_tokens": 8, "temperature": 0, "ignore_eos": True} | changes))


def test_a_prompt_may_be_text_or_ids_or_a_mapping(llm):
    ids = llm.get_tokenizer().encode(PROMPT)
    assert ids[0] == 0  # begins with BOS
    forms = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}, tuple(ids)]
    outputs = llm.generate(forms, greedy())
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [PROMPT, None, PROMPT, None, None]
    assert all(output.prompt_token_ids == ids for output in outputs)
    alone = [llm.generate(form, greedy())[0].outputs[0].token_ids for form in forms]
    assert alone == [output.outputs[0].token_ids for output in outputs]


def test_different_prompts_have_different_outputs(llm):
    assert answer(llm).token_ids != answer(llm, "Sphinx of black quartz").token_ids
    assert len(set(answer(llm).token_ids)) > 3


def test_each_prompt_has_its_own_parameters_and_output(llm):
    rng = random.Random(5)
    lengths = [rng.randrange(1, 20) for _ in range(24)]
    prompts = [[rng.randrange(4, 300) for _ in range(rng.randrange(1, 40))] for _ in lengths]
    outputs = llm.generate(prompts, [greedy(max_tokens=n) for n in lengths])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    for index in (0, 7, 23):
        alone = llm.generate(prompts[index], greedy(max_tokens=lengths[index]))
        assert alone[0].outputs[0].token_ids == outputs[index].outputs[0].token_ids
    assert len({output.request_id for output in outputs}) == 24


def test_requests_end_at_max_tokens_and_at_max_model_len(llm):
    assert len(answer(llm, max_tokens=1).token_ids) == 1
    prompt = [7] * 250
    longest = answer(llm, prompt, max_tokens=None)
    assert len(longest.token_ids) == 6 and longest.finish_reason == "length"
    assert len(answer(llm, prompt, max_tokens=99).token_ids) == 6


def test_eos_ends_a_request_unless_ignored(llm):
    to_eos = {"logit_bias": {1: 100.0}}
    ended = answer(llm, ignore_eos=False, **to_eos)
    assert ended.token_ids == [1] and ended.finish_reason == "stop" and ended.stop_reason is None
    assert ended.text == ""
    ignored = answer(llm, **to_eos)
    assert ignored.token_ids == [1] * LENGTH and ignored.finish_reason == "length"
    late = answer(llm, ignore_eos=False, min_tokens=5, **to_eos)
    assert late.token_ids[-1] == 1 and len(late.token_ids) == 6 and 1 not in late.token_ids[:-1]


def test_stop_token_ids_end_a_request(llm):
    whole = answer(llm).token_ids
    stop = next(token for token in whole[3:] if token not in whole[:3])
    cut = answer(llm, stop_token_ids=[stop, 2])
    assert cut.token_ids == whole[: whole.index(stop) + 1]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop
    shown = answer(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text.startswith(cut.text) and len(shown.text) > len(cut.text)


def test_stop_strings_are_found_across_token_boundaries(llm, readable):
    (output,) = llm.generate(PROMPT, readable())
    whole, tokenizer = output.outputs[0], llm.get_tokenizer()
    starts = [len(tokenizer.decode(whole.token_ids[:n])) for n in range(LENGTH)]
    for border in starts[3:7]:
        stop = whole.text[border - 1 : border + 2]
        end = whole.text.index(stop)
        (cut,) = llm.generate(PROMPT, readable(stop=["never!", stop]))
        assert cut.outputs[0].text == whole.text[:end]
        assert cut.outputs[0].finish_reason == "stop" and cut.outputs[0].stop_reason == stop
        kept = cut.outputs[0].token_ids
        assert kept == whole.token_ids[: len(kept)] and len(kept) < LENGTH
        (shown,) = llm.generate(PROMPT, readable(stop=stop, include_stop_str_in_output=True))
        assert shown.outputs[0].text == whole.text[: end + len(stop)]


def test_the_n_completions_of_a_request_have_different_tokens(llm, readable):
    outputs = llm.generate([PROMPT, "Sphinx"], readable(n=3, max_tokens=12))
    for output in outputs:
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert len({completion.text for completion in output.outputs}) == 3
    # The first completion uses the user's seed; the seeds of the other completions are derived.
    same, next_seed = (
        llm.generate(PROMPT, readable(seed=seed, max_tokens=12))[0].outputs[0].token_ids
        for seed in (11, 12)
    )
    assert same == outputs[0].outputs[0].token_ids
    assert next_seed not in [completion.token_ids for completion in outputs[0].outputs]


@pytest.mark.costly
def test_a_seed_gives_the_same_tokens_in_any_batch(llm, readable):
    alone = llm.generate(PROMPT, readable())[0].outputs[0].token_ids
    other = [readable(seed=n, max_tokens=9, temperature=0.5 + n / 10) for n in range(9)]
    for index in (0, 4, 9):
        params = [*other[:index], readable(), *other[index:]]
        prompts = ["x " * n for n in range(1, 11)]
        prompts[index] = PROMPT
        outputs = llm.generate(prompts, params)
        assert outputs[index].outputs[0].token_ids == alone
    assert llm.generate(PROMPT, readable(seed=12))[0].outputs[0].token_ids != alone


def test_equal_prompts_without_a_seed_get_different_tokens(llm, readable):
    first, second = llm.generate([PROMPT] * 2, readable(seed=None))
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_two_engines_with_the_same_seed_generate_the_same_tokens(model_dir, options):
    def sample():
        with LLM(model_dir, seed=5, **options) as llm:
            return llm.generate([PROMPT] * 2, SamplingParams(max_tokens=8))

    first, second = sample(), sample()
    tokens = [[out.outputs[0].token_ids for out in run] for run in (first, second)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
def test_logprobs_list_the_sampled_token_then_the_most_likely_tokens(llm, num_logprobs):
    completion = answer(llm, logprobs=num_logprobs, temperature=0)
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, here in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(here)) == token
        assert here[token].rank == 1
        assert len(here) == max(1, num_logprobs)  # greedy: the sampled token is the most likely one
        best = [entry.logprob for entry in here.values()]
        assert best == sorted(best, reverse=True) and max(best) <= 0
        assert here[token].decoded_token == llm.get_tokenizer().decode([token])
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    total = sum(here[token].logprob for token, here in pairs)
    assert completion.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_cover_every_position_except_the_first(llm):
    ids = llm.get_tokenizer().encode(PROMPT * 4)
    (output,) = llm.generate([ids], greedy(prompt_logprobs=2))
    assert len(output.prompt_logprobs) == len(ids) and output.prompt_logprobs[0] is None
    for token, here in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
        assert next(iter(here)) == token and 2 <= len(here) <= 3
    # Log-probabilities of a continuation are the same when it is part of the prompt.
    first = answer(llm, ids, logprobs=0)
    (again,) = llm.generate([[*ids, *first.token_ids]], greedy(prompt_logprobs=0))
    for token, message, read in zip(
        first.token_ids, first.logprobs, again.prompt_logprobs[len(ids) :], strict=True
    ):
        assert message[token].logprob == pytest.approx(read[token].logprob, abs=1e-4)


def test_a_cached_prefix_is_not_recomputed(llm):
    assert llm.reset_prefix_cache()
    ids = [5 + n % 200 for n in range(41)]
    cold, warm = (llm.generate([ids], greedy())[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 40)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def test_bad_words_are_not_generated(llm, readable):
    (output,) = llm.generate(PROMPT, readable(temperature=0))
    word = llm.get_tokenizer().decode(output.outputs[0].token_ids[:2])
    (without,) = llm.generate(PROMPT, readable(temperature=0, bad_words=[word]))
    assert not without.outputs[0].text.startswith(word)


def test_a_truncated_prompt_keeps_its_last_tokens(llm):
    ids = list(range(10, 40))
    (cut,) = llm.generate([ids], greedy(truncate_prompt_tokens=7))
    assert cut.prompt_token_ids == ids[-7:]
    assert cut.outputs[0].token_ids == llm.generate([ids[-7:]], greedy())[0].outputs[0].token_ids


def test_each_prompt_may_have_its_own_priority(model_dir, options):
    options |= {"max_num_seqs": 1, "scheduler_cls": "priority"}
    with LLM(model_dir, **options) as llm:
        outputs = llm.generate(["a", "b", "c"], greedy(), priority=[2, 0, 1])
    ends = [output.metrics.finished_ns for output in outputs]
    assert ends[1] < ends[2] < ends[0]


def test_the_model_is_the_only_required_argument_of_llm(model_dir, llm):
    expected = answer(llm).token_ids
    with LLM(str(model_dir), num_threads=1) as opened_llm:  # the free memory is measured
        assert answer(opened_llm).token_ids == expected
        assert opened_llm.llm_engine.max_model_len == 256


# --- chat -------------------------------------------------------------------------------------


CONVERSATION = [{"role": "user", "content": "Judge my vow!"}]


def test_chat_renders_the_chat_template_of_the_model(llm):
    (output,) = llm.chat(CONVERSATION, greedy())
    assert output.prompt == "<|user|>Judge my vow!\n<|assistant|>"
    assert output.prompt_token_ids[0] == 2 and output.prompt_token_ids[-1] == 3  # one token each
    assert len(output.outputs[0].token_ids) == 8


def test_chat_accepts_several_conversations_and_a_custom_template(llm):
    longer = [*CONVERSATION, {"role": "assistant", "content": "No."}, *CONVERSATION]
    outputs = llm.chat([CONVERSATION, longer], greedy())
    assert len(outputs) == 2 and outputs[1].prompt.count("Judge") == 2
    template = "{{ mood }}: {{ messages[0]['content'] }}"
    (other,) = llm.chat(
        CONVERSATION, greedy(), chat_template=template, chat_template_kwargs={"mood": "dire"}
    )
    assert other.prompt == "dire: Judge my vow!"
    (plain,) = llm.chat(CONVERSATION, greedy(), add_generation_prompt=False)
    assert plain.prompt == "<|user|>Judge my vow!\n"


def test_the_parts_of_a_chat_message_are_joined(llm):
    parts = [{"type": "text", "text": "Judge "}, {"type": "text", "text": "my vow!"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], greedy())
    assert output.prompt == "<|user|>Judge my vow!\n<|assistant|>"


def test_a_chat_message_may_have_a_role_that_the_template_names(llm):
    messages = [{"role": "critic", "content": "a"}]
    template = "{% if messages[0].role == 'critic' %}{{ messages[0].content }}{% endif %}"
    (output,) = llm.chat(messages, greedy(), chat_template=template)
    assert output.prompt == "a"
    with pytest.raises(RequestError, match="'critic'; use one of: system"):
        llm.chat(messages, greedy())


@pytest.mark.costly
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[9].content.x }}",
        "{{ (['a' * 1000000] * 60000) | tojson }}",
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
        "{% endfor %}{{ n.x | string }}",
    ],
)
def test_an_error_in_a_chat_template_is_reported_as_an_invalid_request(llm, template):
    (before,) = llm.chat(CONVERSATION, greedy())
    with pytest.raises(RequestError) as rejection:
        llm.chat(CONVERSATION, greedy(), chat_template=template)
    assert rejection.value.parameter == "messages"
    (after,) = llm.chat(CONVERSATION, greedy())
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


# --- progress bar and context manager ---------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "shown", "expected"),
    [(Terminal, True, True), (Terminal, False, False), (io.StringIO, True, False)],
)
def test_a_progress_bar_appears_only_on_a_terminal_and_if_enabled(
    llm, monkeypatch, stream, shown, expected
):
    screen = stream()
    monkeypatch.setattr(sys, "stderr", screen)
    llm.generate([PROMPT] * 3, greedy(), use_tqdm=shown)
    assert bool(screen.getvalue()) == expected
    if expected:
        assert "3/3" in screen.getvalue() and "tokens/s" in screen.getvalue()


def test_a_context_manager_releases_all_resources(model_dir, options):
    with LLM(model_dir, **options) as llm:
        llm.generate(PROMPT, greedy())
        worker = llm.llm_engine.client.core.executor._worker
        assert hasattr(worker, "_model")
    assert not hasattr(worker, "_model")
    llm.shutdown()
    for call in (llm.generate, llm.chat):
        with pytest.raises(EngineDeadError, match="the engine was shut down; create a new one"):
            call(CONVERSATION if call == llm.chat else PROMPT, greedy())


# --- a user's loop over `step` ----------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(model_dir):
    llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model_dir, **OPTIONS))
    yield llm_engine
    llm_engine.shutdown()


def run(engine):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_requests_may_be_added_while_other_requests_run(engine, llm):
    expected = [answer(llm, prompt, max_tokens=9).token_ids for prompt in ("one", "two", "three")]
    assert engine.supported_tasks == ("generate",)
    finished = {}
    for number, prompt in enumerate(("one", "two", "three")):
        engine.add_request(str(number), prompt, greedy(max_tokens=9))
        finished |= {out.request_id: out for out in engine.step() if out.finished}
    finished |= {out.request_id: out for out in run(engine) if out.finished}
    assert [finished[str(n)].outputs[0].token_ids for n in range(3)] == expected


def test_concatenated_deltas_equal_the_final_text(engine, llm, readable):
    for params in (greedy(max_tokens=40), readable(max_tokens=40, stop=["quick", "zz"])):
        (final,) = llm.generate(PROMPT, params)
        engine.add_request("a", PROMPT, params, output_kind=RequestOutputKind.DELTA)
        outputs = [completion for out in run(engine) for completion in out.outputs]
        assert "".join(part.text for part in outputs) == final.outputs[0].text
        tokens = [token for part in outputs for token in part.token_ids]
        assert tokens == final.outputs[0].token_ids
        assert [part.finish_reason for part in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == final.outputs[0].finish_reason


def test_an_abort_does_not_affect_other_requests(engine, llm):
    expected = answer(llm, "stays", max_tokens=12).token_ids
    engine.add_request("stays", "stays", greedy(max_tokens=12))
    engine.add_request("goes", "goes away", greedy(max_tokens=200))
    engine.add_request("waits", "aborted before it runs", greedy())
    engine.abort_request("waits")
    outputs = [out for _ in range(5) for out in engine.step()]
    engine.abort_request("goes")
    outputs += run(engine)
    last = {out.request_id: out.outputs[0] for out in outputs if out.finished}
    assert last["goes"].finish_reason == last["waits"].finish_reason == "abort"
    assert len(last["goes"].token_ids) == 5 and last["waits"].token_ids == []
    assert last["stays"].token_ids == expected
    assert engine.reset_prefix_cache()  # all blocks are free
