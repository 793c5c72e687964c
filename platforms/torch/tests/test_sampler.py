"""The sampler: order of operations, masks, rows and the fast path."""

import time
from array import array

import pytest
import torch

from dovetail.errors import ContractError
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_torch.sampling import GrammarMask, Sampler
from dovetail_torch.sampling import sampler as sampler_module
from dovetail_torch.sampling.masks import BadWords

HOST = torch.device("cpu")
VOCAB = 40


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_request(row=0, prompt=(1, 2, 3), output=(), *, stop=(), bad=(), seed=0, **params):
    return NewRequest(
        request_id=f"r{row}",
        row=row,
        generation=1,
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(**params),
        stop_token_ids=frozenset(stop),
        bad_words_token_ids=tuple(map(tuple, bad)),
        seed=seed,
    )


def new_sampler(*requests, vocab=VOCAB, num_rows=16):
    sampler = Sampler(num_rows=num_rows, vocab_size=vocab, device=HOST)
    for request in requests:
        sampler.join(request)
    return sampler


def falling(num_rows=1, vocab=VOCAB):
    """Return logits that order the tokens by id: token 0 is the most likely, then token 1."""
    return torch.arange(vocab, 0, -1, dtype=torch.float32).repeat(num_rows, 1) / 4


def one(sampler, logits, row=0, grammar=None):
    return sampler.sample(logits.clone(), [row], grammar).token_ids.item()


def grammar_of(allowed_by_run, runs, vocab=VOCAB):
    bits = b""
    for allowed in allowed_by_run.values():
        word = sum(1 << token for token in allowed)
        bits += word.to_bytes(4 * ((vocab + 31) // 32), "little")
    output = GrammarOutput(runs=tuple(allowed_by_run), bitmask=bits)
    return GrammarMask.of(output, runs, vocab, torch.from_numpy)


def test_greedy_sampling_takes_the_first_most_likely_token_in_any_dtype():
    torch.manual_seed(0)
    for vocab in (7, 5000, 4096 + 128, 4096 + 77):
        logits = torch.randn(5, vocab)
        logits[1] = 0.0
        logits[2, -1] = 99.0
        logits[3] = -torch.inf
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            sampler = new_sampler(*(new_request(r, temperature=0) for r in range(5)), vocab=vocab)
            expected = logits.to(dtype).argmax(-1)
            out = sampler.sample(logits.to(dtype), array("i", range(5)))
            assert out.token_ids.dtype == torch.int64
            assert torch.equal(out.token_ids, expected)
            assert out.logprobs == {}


def test_a_batch_of_greedy_requests_calls_argmax_once(monkeypatch):
    calls = []

    def counted(logits):
        calls.append(logits.shape)
        return logits.argmax(-1)

    def rejected(*_args, **_kwargs):
        raise AssertionError("the fast path must not call this")

    sampler = new_sampler(
        *(new_request(r, temperature=0) for r in range(8)),
        new_request(8, temperature=1.0),  # not in the batch
        new_request(9, temperature=0, logprobs=1),
    )
    monkeypatch.setattr(sampler, "_best_tokens", counted)
    monkeypatch.setattr(sampler_module.Sampler, "_describe", rejected)
    out = sampler.sample(falling(8), list(range(8)))
    assert out.token_ids.tolist() == [0] * 8
    assert calls == [(8, VOCAB)]


def test_a_greedy_request_uses_the_fast_path_again_after_min_tokens(monkeypatch):
    sampler = new_sampler(new_request(temperature=0, min_tokens=2, stop=[0]))
    assert [one(sampler, falling()) for _ in range(3)] == [1, 1, 0]
    monkeypatch.setattr(sampler_module.Sampler, "_describe", lambda *_: pytest.fail("slow path"))
    assert one(sampler, falling()) == 0


def test_min_tokens_includes_output_tokens_from_before_a_preemption():
    sampler = new_sampler(new_request(output=[5, 6], temperature=0, min_tokens=3, stop=[0, 1]))
    assert [one(sampler, falling()) for _ in range(2)] == [2, 0]


def test_only_allowed_token_ids_are_sampled():
    sampler = new_sampler(
        new_request(0, temperature=0, allowed_token_ids=[7, 9]),
        new_request(1, temperature=0),
    )
    assert sampler.sample(falling(2), [1, 0]).token_ids.tolist() == [0, 7]
    probs = sampler.distribution(falling(2), [0, 1])
    assert probs[0].nonzero().flatten().tolist() == [7]


def test_logit_bias_is_applied_before_temperature():
    sampler = new_sampler(new_request(temperature=0.5, logit_bias={3: 2.5, 0: -100.0}))
    expected = falling()
    expected[0, 3] += 2.5
    expected[0, 0] -= 100.0
    actual = sampler.distribution(falling(), [0])
    torch.testing.assert_close(actual, (expected / 0.5).softmax(-1))


def test_bad_words_depend_only_on_output_tokens():
    bad = [(0,), (3, 4, 1), (8, 2)]
    # (3, 4) is the end of the prompt, not output, so token 1 is allowed.
    sampler = new_sampler(new_request(prompt=[3, 4], temperature=0, bad=bad))
    assert one(sampler, falling()) == 1
    sampler = new_sampler(new_request(prompt=[9], output=[3, 4], temperature=0, bad=bad))
    assert one(sampler, falling()) == 2
    # The start of a bad word in the prompt has no effect.
    sampler = new_sampler(new_request(prompt=[3], output=[4], temperature=0, bad=bad))
    assert one(sampler, falling()) == 1


def test_bad_words_depend_on_tokens_sampled_in_earlier_steps():
    sampler = new_sampler(new_request(temperature=0, bad=[(0, 0)]))
    assert [one(sampler, falling()) for _ in range(4)] == [0, 1, 0, 1]


def test_bad_words_with_the_same_last_token_do_not_affect_each_other():
    bad = [(5, 0), (6, 0), (7, 7, 0)]
    sampler = new_sampler(new_request(output=[6], temperature=0, bad=bad))
    assert one(sampler, falling()) == 1
    sampler = new_sampler(new_request(output=[8], temperature=0, bad=bad))
    assert one(sampler, falling()) == 0


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 300])
def test_short_and_long_bad_words_apply_together(length):
    before = [5 + number % 30 for number in range(length - 1)]
    bad = [(0,), (*before, 1), (3, 4, 2)]
    request = new_request(0, output=before, temperature=0, bad=bad)
    sampler = new_sampler(request, new_request(1, temperature=0))
    actual = sampler.sample(falling(2), [0, 1]).token_ids.tolist()
    assert actual == [2, 0]  # the other request is unconstrained
    later = new_request(0, output=[*before, 4], temperature=0, bad=bad)
    assert one(new_sampler(later), falling()) == 1


def test_one_long_bad_word_does_not_make_all_others_as_long():
    words = [(token % VOCAB,) for token in range(4000)] + [(1,) * 1000]
    groups = BadWords.groups(words, lambda values: torch.from_numpy(values))
    assert [len(group.last_W) for group in groups] == [4000, 1]
    assert sum(group.before_WL.numel() for group in groups) < 40_000


def test_a_grammar_masks_only_the_logits_of_its_requests():
    sampler = new_sampler(new_request(0, temperature=0), new_request(1, temperature=0))
    grammar = grammar_of({4: [33, 39], 5: [2]}, runs=[3, 4])  # run 5 does not sample
    assert sampler.sample(falling(2), [0, 1], grammar).token_ids.tolist() == [0, 33]


def test_a_grammar_for_requests_that_sample_no_token_changes_nothing():
    sampler = new_sampler(new_request(0, temperature=0))
    grammar = grammar_of({4: [33]}, runs=[0])
    assert one(sampler, falling(), grammar=grammar) == 0


def test_a_bit_mask_of_the_wrong_length_is_rejected():
    output = GrammarOutput(runs=(0,), bitmask=b"\xff" * 4)
    with pytest.raises(ContractError, match="8 bytes, but has 4"):
        GrammarMask.of(output, [0], VOCAB, torch.from_numpy)


def test_contradictory_sampling_parameters_always_leave_an_allowed_token():
    row = {"temperature": 0, "allowed_token_ids": [7, 9], "min_tokens": 1}
    # All allowed tokens are forbidden: the forbidden tokens are ignored.
    sampler = new_sampler(new_request(bad=[(7,)], stop=[9], **row))
    assert one(sampler, falling()) == 7
    # The grammar and allowed_token_ids share no token: the grammar has priority.
    sampler = new_sampler(new_request(**row))
    assert one(sampler, falling(), grammar=grammar_of({0: [20, 21]}, [0])) == 20
    # The grammar allows no token: it is skipped.
    assert one(sampler, falling(), grammar=grammar_of({0: []}, [0])) == 7
    # A random row behaves the same way, without NaN.
    sampler = new_sampler(new_request(bad=[(7,)], stop=[9], **{**row, "temperature": 1.0}))
    probs = sampler.distribution(falling(), [0])
    assert probs[0].nonzero().flatten().tolist() == [7, 9]
    assert probs.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_invalid_logits_do_not_affect_other_requests(value, vocab):
    all_settings = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "min_p": 0.5, "repetition_penalty": 1.3, "allowed_token_ids": [1]},
    ]
    broken = [new_request(r, **w) for r, w in enumerate(all_settings)]
    sound = [new_request(r + 5, **w) for r, w in enumerate(all_settings)]
    sampler = new_sampler(*broken, *sound, vocab=vocab)
    alone = new_sampler(*sound, vocab=vocab)
    logits = torch.randn(10, vocab, generator=torch.Generator().manual_seed(1))
    logits[:5] = value
    tokens = sampler.sample(logits.clone(), list(range(10))).token_ids
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    assert torch.equal(tokens[5:], alone.sample(logits[5:], list(range(5, 10))).token_ids)


def test_ids_outside_the_vocabulary_are_ignored():
    sampler = new_sampler(
        new_request(
            prompt=[1, VOCAB + 5, -1],
            temperature=0,
            repetition_penalty=1.5,
            min_tokens=2,
            stop=[0, VOCAB],
            bad=[(VOCAB,), (1, VOCAB + 1)],
            logit_bias={VOCAB + 9: 5.0},
            allowed_token_ids=[VOCAB, 0, 2],
        )
    )
    assert one(sampler, falling()) == 2


def test_a_prompt_without_tokens_of_the_vocabulary_is_not_penalized():
    sampler = new_sampler(new_request(prompt=[VOCAB], temperature=0, repetition_penalty=9.0))
    assert [one(sampler, falling()) for _ in range(2)] == [0, 1]


def test_a_reused_row_has_no_state_of_the_previous_request():
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB)
    everything = new_request(
        prompt=range(20),
        output=range(20),
        temperature=0.3,
        top_k=2,
        top_p=0.4,
        min_p=0.3,
        repetition_penalty=5.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={30: 50.0},
        allowed_token_ids=[30, 31],
        min_tokens=30,
        max_tokens=40,
        stop=[5],
        bad=[(30,), (1, 31)],
        logprobs=3,
        seed=9,
    )
    for with_leave in (False, True):
        for settings in ({"temperature": 1.0}, {"temperature": 0, "repetition_penalty": 1.1}):
            fresh = new_sampler(new_request(seed=4, **settings))
            used = new_sampler(everything)
            used.sample(logits.clone(), [0])
            if with_leave:
                used.leave(0)
            used.join(new_request(seed=4, **settings))
            expected = fresh.distribution(logits.clone(), [0])
            assert torch.equal(used.distribution(logits.clone(), [0]), expected)
            for _ in range(5):
                first = fresh.sample(logits.clone(), [0])
                second = used.sample(logits.clone(), [0])
                assert first.token_ids.tolist() == second.token_ids.tolist()
                assert second.logprobs == {}
    used.join(new_request(temperature=0))
    assert one(used, falling()) == 0


def test_token_histories_stay_correct_while_requests_start_and_finish():
    """Histories stay with their rows while history slots are freed, reused and added."""
    random = torch.Generator().manual_seed(5)
    sampler = new_sampler(num_rows=64)
    prompts = {}
    for step in range(300):
        row = int(torch.randint(0, 64, (), generator=random))
        if row in prompts and step % 3:
            sampler.leave(row)
            del prompts[row]
            continue
        length = int(torch.randint(1, 600, (), generator=random))
        prompt = torch.randint(0, VOCAB // 2, (length,), generator=random).tolist()
        prompts[row] = set(prompt)
        sampler.join(new_request(row, prompt, temperature=0, repetition_penalty=4.0))
    rows = list(prompts)
    assert len(rows) > 8
    tokens = sampler.sample(falling(len(rows)), rows).token_ids.tolist()
    values = falling()[0]
    for row, token in zip(rows, tokens, strict=True):
        penalized = [v / 4 if t in prompts[row] else v for t, v in enumerate(values.tolist())]
        assert token == max(range(VOCAB), key=penalized.__getitem__)


def test_the_sampler_works_inside_and_outside_of_inference_mode():
    sampler = new_sampler(num_rows=64)
    settings = {"temperature": 1.0, "repetition_penalty": 1.2}
    with torch.inference_mode():
        sampler.join(new_request(0, **settings))
        sampler.sample(falling(), [0])
    for row in range(1, 20):
        sampler.join(new_request(row, prompt=range(30), **settings))
    sampler.sample(falling(20), list(range(20)))
    with torch.inference_mode():
        sampler.sample(falling(20), list(range(20)))


def test_an_empty_batch_has_no_tokens():
    sampler = new_sampler(new_request(temperature=1.0))
    assert sampler.sample(falling(0), []).token_ids.tolist() == []


@pytest.mark.clock
def test_a_step_on_the_fast_path_needs_no_python_code_per_request():
    """A step takes about 20 µs. The limit is higher, because the machine may be busy."""
    sampler = new_sampler(*(new_request(r, temperature=0) for r in range(16)))
    logits, rows = falling(16), list(range(16))
    took = []
    for _ in range(50):
        begin = time.perf_counter()
        sampler.sample(logits, rows)
        took.append(time.perf_counter() - begin)
    assert sorted(took)[25] < 1e-3
