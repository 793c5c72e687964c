from array import array

import pytest

from dovetail.clock import ManualClock
from dovetail.engine.input.input_processor import InputFacts, InputProcessor
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.errors import RequestError
from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished
from dovetail.outputs import Logprob, RequestOutputKind
from dovetail.request import FinishReason
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
EOS = ByteTokenizer.EOS
FACTS = InputFacts(vocab_size=259, max_model_len=500, eos_token_ids=frozenset({EOS}))
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class ProcessorDriver:
    """An output processor with methods that add requests and step results."""

    def __init__(self, tokenizer=True):
        self.clock = ManualClock(10)
        tokenizer = ByteTokenizer() if tokenizer else None
        self.inputs = InputProcessor(FACTS, tokenizer=tokenizer, clock=self.clock)
        self.outputs = OutputProcessor(tokenizer, clock=self.clock)

    def add(self, request_id, kind=CUMULATIVE, prompt="say", **options):
        options.setdefault("max_tokens", 100)
        requests = self.inputs.process(request_id, prompt, SamplingParams(**options))
        text = prompt if isinstance(prompt, str) else None
        self.outputs.add_request(request_id, requests, prompt=text, kind=kind)

    def step(self, tokens=None, ends=(), **columns):
        """Process a step. tokens: bytes or ids by request. ends: (id, reason[, stop_reason])."""
        self.clock.advance(5)
        tokens = {name: list(ids) for name, ids in (tokens or {}).items()}
        finished = [
            Finished(request_id=end[0], reason=end[1], stop_reason=end[2] if end[2:] else None)
            for end in ends
        ]
        return self.outputs.process(
            EngineCoreOutputs(
                request_ids=list(tokens),
                num_new_tokens=array("i", map(len, tokens.values())),
                token_ids=array("i", [t for ids in tokens.values() for t in ids]),
                finished=tuple(finished),
                **columns,
            )
        )


def columns(*positions):
    """Return log-probabilities. Each position is (token, logprob, rank, [(token, logprob), …])."""
    entries = [[(token, logprob), *best] for token, logprob, _, best in positions]
    return LogprobColumns(
        counts=array("i", map(len, entries)),
        token_ids=array("i", [token for entry in entries for token, _ in entry]),
        logprobs=array("f", [logprob for entry in entries for _, logprob in entry]),
        ranks=array("i", [rank for _, _, rank, _ in positions]),
    )


def test_cumulative_outputs_contain_all_tokens_so_far():
    processor = ProcessorDriver()
    processor.add("r")
    (first,) = processor.step({"r": b"He"}).request_outputs
    (second,) = processor.step({"r": b"llo"}).request_outputs
    (last,) = processor.step({"r": [EOS]}, [("r", STOP)]).request_outputs
    assert [o.outputs[0].text for o in (first, second, last)] == ["He", "Hello", "Hello"]
    assert first.outputs[0].token_ids == list(b"He")
    assert last.outputs[0].token_ids == [*b"Hello", EOS]
    assert [o.finished for o in (first, second, last)] == [False, False, True]
    assert [o.outputs[0].finish_reason for o in (first, second, last)] == [None, None, "stop"]
    assert last.outputs[0].stop_reason is None
    assert (last.prompt, last.prompt_token_ids) == ("say", [256, *b"say"])
    assert processor.outputs.num_unfinished == 0


def test_delta_outputs_contain_only_new_tokens():
    processor = ProcessorDriver()
    processor.add("r", DELTA)
    steps = [({"r": b"a\xc3"}, ()), ({"r": b"\xa9"}, ()), ({"r": b"b"}, [("r", LENGTH)])]
    outputs = [processor.step(*step).request_outputs[0].outputs[0] for step in steps]
    assert [o.text for o in outputs] == ["a", "é", "b"]
    assert [o.token_ids for o in outputs] == [[97, 0xC3], [0xA9], [98]]
    assert [o.finish_reason for o in outputs] == [None, None, "length"]


@pytest.mark.parametrize("options", [{}, {"stop": "never"}, {"logprobs": 0}])
def test_the_final_only_output_kind_returns_one_output(options):
    processor = ProcessorDriver()
    processor.add("r", FINAL_ONLY, **options)
    plain = options.get("logprobs") is None
    for piece in (b"H", b"e", b"llo \xc3"):
        logprobs = {} if plain else {"r": columns(*[(t, -1.0, 1, []) for t in piece])}
        assert processor.step({"r": piece}, logprobs=logprobs).request_outputs == []
    (output,) = processor.step(ends=[("r", LENGTH)]).request_outputs
    assert output.outputs[0].text == "Hello \ufffd"
    assert output.outputs[0].token_ids == list(b"Hello \xc3")
    assert output.outputs[0].finish_reason == "length"
    assert output.finished


def test_all_output_kinds_agree_on_the_complete_output():
    texts = {}
    for kind in RequestOutputKind:
        processor = ProcessorDriver()
        processor.add("r", kind, stop=["END"], prompt=[1, 2])
        collected = []
        for byte in "né E ENE EN END more".encode():
            processed = processor.step({"r": [byte]})
            collected += [o.outputs[0] for o in processed.request_outputs]
        texts[kind] = "".join(o.text for o in collected) if kind is DELTA else collected[-1].text
        tokens = (
            [t for o in collected for t in o.token_ids]
            if kind is DELTA
            else collected[-1].token_ids
        )
        assert bytes(tokens).decode() == "né E ENE EN END"
    assert set(texts.values()) == {"né E ENE EN "}


def test_a_stop_string_finishes_the_request_and_aborts_it_in_the_core():
    processor = ProcessorDriver()
    processor.add("r", stop=["lo w"])
    assert processor.step({"r": b"Hel"}).to_abort == []
    processed = processor.step({"r": b"lo world"})
    assert processed.to_abort == ["r"]
    (output,) = processed.request_outputs
    done = output.outputs[0]
    assert (done.text, done.finish_reason, done.stop_reason) == ("Hel", "stop", "lo w")
    assert done.token_ids == list(b"Hello w")
    assert output.finished
    # The core may have a plan in flight; its result is dropped.
    late = processor.step({"r": b"x"}, [("r", LENGTH)])
    assert late.request_outputs == late.to_abort == []


def test_a_stop_string_in_the_last_step_needs_no_abort():
    processor = ProcessorDriver()
    processor.add("r", stop=["b"], include_stop_str_in_output=True)
    processed = processor.step({"r": [*b"abc", EOS]}, [("r", STOP)])
    assert processed.to_abort == []
    (output,) = processed.request_outputs
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "b")
    assert output.outputs[0].token_ids == list(b"ab")


def test_a_possible_stop_string_prefix_is_held_back_until_the_end():
    processor = ProcessorDriver()
    processor.add("r", DELTA, stop=["<end>"])
    (first,) = processor.step({"r": b"a<e"}).request_outputs
    (last,) = processor.step({"r": b"n"}, [("r", LENGTH)]).request_outputs
    assert (first.outputs[0].text, last.outputs[0].text) == ("a", "<en")


def test_stop_strings_are_ignored_before_min_tokens():
    processor = ProcessorDriver()
    processor.add("r", stop=["ab"], min_tokens=4)
    (output,) = processor.step({"r": b"ababab"}).request_outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("ab", list(b"abab"))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_text_of_a_stop_token_is_shown_only_when_requested(kind):
    processor = ProcessorDriver()
    options = {"stop_token_ids": [ord("!")], "skip_special_tokens": False}
    processor.add("r", kind, **options)
    processor.add("s", kind, include_stop_str_in_output=True, **options)
    processor.add("e", kind, **options)
    ends = [("r", STOP, 33), ("s", STOP, 33), ("e", LENGTH)]
    outputs = processor.step({"r": b"a!", "s": b"a!", "e": [97, EOS]}, ends).request_outputs
    assert [o.outputs[0].text for o in outputs] == ["a", "a!", "a<eos>"]
    assert [o.outputs[0].stop_reason for o in outputs] == [33, 33, None]
    assert outputs[0].outputs[0].token_ids == list(b"a!")


def test_logprobs_contain_one_mapping_per_token():
    processor = ProcessorDriver()
    processor.add("r", logprobs=2)
    best = [(98, -0.5), (97, -1.0)]
    arguments = columns((97, -1.0, 2, best), (120, -3.0, 9, best))
    (output,) = processor.step({"r": b"ax"}, logprobs={"r": arguments}).request_outputs
    first, second = output.outputs[0].logprobs
    assert list(first.items()) == [(97, Logprob(-1.0, 2, "a")), (98, Logprob(-0.5, 1, "b"))]
    assert second[120] == Logprob(-3.0, 9, "x")
    assert (second[98].rank, second[97].rank) == (1, 2)
    assert output.outputs[0].cumulative_logprob == -4.0


def test_logprobs_match_the_returned_tokens_of_each_output_kind():
    processor = ProcessorDriver()
    processor.add("r", DELTA, logprobs=0, stop=["bc"])
    (first,) = processor.step(
        {"r": b"a"}, logprobs={"r": columns((97, -1.0, 1, []))}
    ).request_outputs
    arguments = columns(*[(token, -2.0, 1, []) for token in b"bcde"])
    (last,) = processor.step({"r": b"bcde"}, logprobs={"r": arguments}).request_outputs
    assert first.outputs[0].logprobs == [{97: Logprob(-1.0, 1, "a")}]
    assert [set(here) for here in last.outputs[0].logprobs] == [{98}, {99}]
    assert last.outputs[0].token_ids == [98, 99]
    assert last.outputs[0].cumulative_logprob == -5.0


def test_prompt_logprobs_begin_with_none_and_can_arrive_in_chunks():
    processor = ProcessorDriver()
    processor.add("r", DELTA, prompt="abc", prompt_logprobs=0)
    first = {"r": columns((97, -1.0, 1, []), (98, -2.0, 1, []))}
    assert processor.step(prompt_logprobs=first).request_outputs == []
    second = {"r": columns((99, -3.0, 4, []))}
    (output,) = processor.step({"r": b"x"}, prompt_logprobs=second).request_outputs
    assert output.prompt_logprobs[0] is None
    assert [list(here) for here in output.prompt_logprobs[1:]] == [[97], [98], [99]]
    assert output.prompt_logprobs[3][99] == Logprob(-3.0, 4, "c")
    assert processor.step({"r": b"y"}).request_outputs[0].prompt_logprobs is None


def test_output_fields_that_were_not_requested_are_none():
    processor = ProcessorDriver()
    processor.add("r")
    (output,) = processor.step({"r": b"x"}, [("r", LENGTH)]).request_outputs
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_all_completions_of_a_prompt_are_returned_in_one_output():
    processor = ProcessorDriver()
    processor.add("r", n=3)
    (output,) = processor.step({"r#2": b"c", "r#0": b"a"}).request_outputs
    assert [(o.index, o.text) for o in output.outputs] == [(0, "a"), (1, ""), (2, "c")]
    ends = [("r#0", LENGTH), ("r#2", STOP)]
    (output,) = processor.step({"r#1": b"b"}, ends).request_outputs
    assert not output.finished
    assert [o.finish_reason for o in output.outputs] == ["length", None, "stop"]
    (output,) = processor.step(ends=[("r#1", LENGTH)]).request_outputs
    assert output.finished
    assert [o.text for o in output.outputs] == ["a", "b", "c"]


def test_delta_outputs_contain_only_completions_with_new_tokens():
    processor = ProcessorDriver()
    processor.add("r", DELTA, n=2)
    (output,) = processor.step({"r#1": b"b"}).request_outputs
    assert [o.index for o in output.outputs] == [1]
    (output,) = processor.step({"r#0": b"a"}, [("r#1", LENGTH)]).request_outputs
    assert [(o.index, o.text, o.finish_reason) for o in output.outputs] == [
        (0, "a", None),
        (1, "", "length"),
    ]
    (output,) = processor.step(ends=[("r#0", LENGTH)]).request_outputs
    assert [o.index for o in output.outputs] == [0]


def test_the_final_only_output_kind_waits_for_the_last_completion():
    processor = ProcessorDriver()
    processor.add("r", FINAL_ONLY, n=2)
    assert processor.step({"r#0": b"a", "r#1": b"b"}, [("r#0", LENGTH)]).request_outputs == []
    (output,) = processor.step({"r#1": b"b"}, [("r#1", LENGTH)]).request_outputs
    assert [o.text for o in output.outputs] == ["a", "bb"]


def test_an_abort_ends_all_completions_of_a_request():
    processor = ProcessorDriver()
    processor.add("r", n=2)
    processor.add("s")
    processor.step({"r#0": b"a", "r#1": b"b", "s": b"s"}, [("r#0", LENGTH)])
    aborted = processor.outputs.abort(["r", "unknown"])
    assert aborted.to_abort == ["r#1"]
    (output,) = aborted.request_outputs
    assert output.finished
    assert [(o.text, o.finish_reason) for o in output.outputs] == [("a", "length"), ("b", "abort")]
    assert processor.outputs.num_unfinished == 1
    assert processor.outputs.abort(["r"]).request_outputs == []


def test_a_failed_request_returns_the_error_message():
    processor = ProcessorDriver()
    processor.add("r", FINAL_ONLY)
    failure = Finished(request_id="r", reason=FinishReason.ERROR, message="the row broke")
    (output,) = processor.outputs.process(EngineCoreOutputs(finished=(failure,))).request_outputs
    assert (output.error, output.outputs[0].finish_reason) == ("the row broke", "error")


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_contain_metrics_and_cached_tokens(kind):
    processor = ProcessorDriver()
    processor.add("r", kind)
    processor.step(num_cached_tokens={"r": 3, "other": 9})
    processor.step({"r": b"a"})
    processor.step({"r": b"b"})
    (output,) = processor.step(ends=[("r", LENGTH)]).request_outputs
    metrics = output.metrics
    assert (metrics.arrival_ns, metrics.first_token_ns, metrics.finished_ns) == (10, 20, 30)
    assert output.num_cached_tokens == 3


def test_a_duplicate_request_id_is_rejected_until_the_request_ends():
    processor = ProcessorDriver()
    processor.add("r", n=2)
    for name in ("r", "r#0"):
        with pytest.raises(RequestError, match="in use"):
            processor.add(name)
    processor.outputs.abort(["r"])
    processor.add("r#0")


def test_outputs_have_no_text_without_a_tokenizer_or_with_detokenize_off():
    for processor, options in (
        (ProcessorDriver(tokenizer=False), {}),
        (ProcessorDriver(), {"detokenize": False}),
    ):
        processor.add("r", prompt=[1], logprobs=0, **options)
        kwargs = {"r": columns((97, -1.0, 1, []))}
        (output,) = processor.step({"r": b"a"}, [("r", LENGTH)], logprobs=kwargs).request_outputs
        assert (output.prompt, output.outputs[0].text) == (None, "")
        assert output.outputs[0].token_ids == [97]
        assert output.outputs[0].logprobs == [{97: Logprob(-1.0, 1, None)}]


def test_returned_outputs_are_not_changed_by_later_steps():
    processor = ProcessorDriver()
    processor.add("r", logprobs=0)
    (first,) = processor.step(
        {"r": b"a"}, logprobs={"r": columns((97, -1.0, 1, []))}
    ).request_outputs
    processor.step({"r": b"b"}, logprobs={"r": columns((98, -1.0, 1, []))})
    assert first.outputs[0].token_ids == [97]
    assert len(first.outputs[0].logprobs) == 1


def test_the_text_of_a_long_output_is_decoded_incrementally():
    class Counting(ByteTokenizer):
        num_decoded = 0

        def token_pieces(self, *, skip_special_tokens):
            return None

        def decode(self, token_ids, *, skip_special_tokens=False):
            Counting.num_decoded += 1
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    processor = ProcessorDriver()
    processor.outputs = OutputProcessor(Counting(), clock=processor.clock)
    processor.add("r", FINAL_ONLY, max_tokens=400)
    maximum = 0
    for number in range(300):
        Counting.num_decoded = 0
        ends = [("r", LENGTH)] if number == 299 else []
        outputs = processor.step({"r": b"a"}, ends).request_outputs
        maximum = max(maximum, Counting.num_decoded)
    assert outputs[0].outputs[0].text == "a" * 300
    assert 0 < maximum < 100


def test_all_outputs_of_a_request_share_the_prompt_token_ids():
    processor = ProcessorDriver()
    processor.add("r", DELTA)
    processor.add("s", DELTA)
    first, other = processor.step({"r": b"a", "s": b"a"}).request_outputs
    second, _ = processor.step({"r": b"b", "s": b"b"}).request_outputs
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.prompt_token_ids is not other.prompt_token_ids
    assert first.prompt_token_ids == [256, *b"say"]


def test_logprobs_contain_the_text_that_a_token_adds():
    processor = ProcessorDriver()
    processor.add("r", logprobs=1)
    arguments = columns((0xC3, -1.0, 2, [(EOS, -0.5)]), (32, -1.0, 1, [(32, -1.0)]))
    (output,) = processor.step({"r": b"\xc3 "}, logprobs={"r": arguments}).request_outputs
    first, second = output.outputs[0].logprobs
    assert [item.decoded_token for item in first.values()] == ["\ufffd", "<eos>"]
    assert [item.decoded_token for item in second.values()] == [" "]
