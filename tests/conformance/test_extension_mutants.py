"""The suites of engine extensions detect faulty extensions: each mutant has one fault."""

import re
import threading
from dataclasses import replace

import pytest
import torch

from dovetail.errors import RequestError
from dovetail.interfaces import (
    CallText,
    IOBatch,
    IOPrompt,
    ReasoningDelta,
    ReasoningMarkers,
    ToolDelta,
)
from dovetail_devkit import load_suite
from dovetail_devkit.fakes.grammar import FakeGrammar, FakeMatcher
from dovetail_devkit.fakes.hooks import FakeHooks
from dovetail_devkit.fakes.io_processor import FakeIOProcessor
from dovetail_devkit.fakes.logits_processor import FakeLogitsProcessor
from dovetail_devkit.fakes.reasoning_parser import FakeReasoningParser
from dovetail_devkit.fakes.stat_logger import FakeStatLogger
from dovetail_devkit.fakes.step_extension import FakeStepExtension
from dovetail_devkit.fakes.tool_parser import FakeToolParser
from dovetail_devkit.fakes.worker_extension import FakeWorkerExtension


class ChangesEveryRow(FakeLogitsProcessor):
    def apply(self, logits_SV, rows):
        return super().apply(logits_SV, rows) + 1


class AllowsBannedTokens(FakeLogitsProcessor):
    def apply(self, logits_SV, rows):
        for index, row in enumerate(rows):
            if row in self._last:
                logits_SV[index, (self._last[row] + 1) % self._vocab_size] = 9.0
        return logits_SV


class BansEveryToken(FakeLogitsProcessor):
    def apply(self, logits_SV, rows):
        for index, row in enumerate(rows):
            if row in self._last and self._last[row] == 3:
                logits_SV[index] = -torch.inf
        return super().apply(logits_SV, rows)


class DependsOnOtherRows(FakeLogitsProcessor):
    def apply(self, logits_SV, rows):
        for index, row in enumerate(rows):
            if row in self._last:
                logits_SV[index] += len(rows)
        return logits_SV


class IgnoresEarlierTokens(FakeLogitsProcessor):
    """Ignores the tokens that a resumed request has generated before."""

    def join(self, request):
        taken = super().join(request)
        if taken:
            self._last[request.row] = request.token_ids[request.num_prompt_tokens - 1]
        return taken


class RejectsEveryRequest(FakeLogitsProcessor):
    def join(self, request):
        return False


class StaysAfterLeave(FakeLogitsProcessor):
    def leave(self, row):
        pass


class CountsCalls(FakeLogitsProcessor):
    calls = 0

    def apply(self, logits_SV, rows):
        self.calls += 1
        for index, row in enumerate(rows):
            if row in self._last:
                logits_SV[index] += self.calls
        return logits_SV


class ReturnsFloat16(FakeLogitsProcessor):
    def apply(self, logits_SV, rows):
        return super().apply(logits_SV, rows).to(torch.bfloat16)


class DependsOnEarlierCalls(FakeIOProcessor):
    """Reuses data of the previous call."""

    def pre_process(self, request):
        batch = super().pre_process(request)
        self.batch = [*getattr(self, "batch", ()), *batch.prompts]
        return batch

    def post_process(self, result):
        return [*super().post_process(result), len(self.batch)]


class ChangesData(FakeIOProcessor):
    def pre_process(self, request):
        batch = super().pre_process(request)
        request.data.append("more")
        return batch


class AcceptsInvalidData(FakeIOProcessor):
    def pre_process(self, request):
        try:
            return super().pre_process(request)
        except RequestError:
            return IOBatch(prompts=())


class ReturnsNoBatch(FakeIOProcessor):
    def pre_process(self, request):
        return [IOPrompt(prompt=text) for text in request.data]


class HidesErrors(FakeIOProcessor):
    def post_process(self, result):
        return list(result.request.data)


class ChangesOutputs(FakeIOProcessor):
    def post_process(self, result):
        actual = super().post_process(result)
        for output in result.outputs:
            output.outputs.clear()
        return actual


class Prints(FakeStatLogger):
    def record(self, step):
        print(step)


class ClosesOnce(FakeStatLogger):
    def close(self):
        if self.num_closed:
            raise ValueError("closed twice")
        super().close()


class DividesByZero(FakeStatLogger):
    before_ns = 0

    def record(self, step):
        self.rate = step.num_new_tokens / (step.now_ns - self.before_ns)
        self.before_ns = step.now_ns


class BlocksTheEngine(FakeStatLogger):
    def record(self, step):
        threading.Event().wait(0.003)


class ImplementsNoHook:
    def __init__(self, context):
        pass


class RaisesInAHook(FakeHooks):
    def on_step(self, step):
        raise KeyError("step")


class MisspellsAHook(FakeHooks):
    def on_request_eror(self, request_id):
        pass


class DefinesInit(FakeWorkerExtension):
    def __init__(self, context):
        pass


class OverridesAWorkerMethod(FakeWorkerExtension):
    def load_model(self):
        pass


class HasNoPublicMethod:
    LIMIT = 3


class ReadsOtherRows(FakeStepExtension):
    def logits(self, rows, logits_RV):
        return logits_RV + len(rows)


class IgnoresGeneratedTokens(FakeStepExtension):
    def join(self, row, request):
        joins = super().join(row, request)
        if joins:
            self._last[row] = request.token_ids[request.num_prompt_tokens - 1]
        return joins


class AcceptsEveryRequest(FakeStepExtension):
    def join(self, row, request):
        super().join(row, request)
        return True


class DropsHiddenStates(FakeStepExtension):
    def hidden_states(self, batch, hidden_TD):
        return hidden_TD[:0]


class RestoresBannedTokens(FakeStepExtension):
    def logits(self, rows, logits_RV):
        return logits_RV.clamp_min(-50.0)


def grammar_with(**methods):
    """Return a fake grammar with replaced matcher methods."""
    matcher_cls = type("Mutant", (FakeMatcher,), methods)

    class Mutant(FakeGrammar):
        def compile(self, spec):
            if spec.form not in self.forms:
                raise RequestError("unknown form")
            created = super().compile(spec)
            return matcher_cls(created._positions, created._ends)

    return Mutant


def allow_everything(self, words):
    words[:] = b"\xff" * len(words)


class AcceptsAnyForm(FakeGrammar):
    def compile(self, spec):
        return super().compile(replace(spec, form="token_ids", text=self.examples["token_ids"]))


class WaitsForTheWholeCall(FakeToolParser):
    """Returns nothing before the end of the text."""

    def feed(self, text):
        self._text += text
        return ToolDelta()


class CallsUnknownFunctions(FakeToolParser):
    def __init__(self, context):
        super().__init__(context)
        self._names = {"get_weather"}


class DropsMarkersInContent(FakeToolParser):
    def feed(self, text):
        return super().feed(text.replace("<", ""))


class DependsOnPieces(FakeToolParser):
    """Finds a tool call only if its marker arrives in one piece."""

    def _read(self, *, is_last):
        return super()._read(is_last=True)


class ForcesAnotherFormat(FakeToolParser):
    @classmethod
    def call_text(cls, name):
        return CallText(begin=f"[{name} ", end="]", trigger="[")


class RepeatsCallIds(FakeToolParser):
    @classmethod
    def new_call_id(cls):
        return "call_1"


class KeepsTheMarker(FakeReasoningParser):
    example = "<why>I think.</why>No."


class WaitsForTheWholeReasoning(FakeReasoningParser):
    def feed(self, text):
        self._kept = getattr(self, "_kept", "") + text
        return ReasoningDelta()

    def finish(self):
        arguments = super().feed(self._kept) if hasattr(self, "_kept") else ReasoningDelta()
        rest = super().finish()
        return ReasoningDelta(
            reasoning=arguments.reasoning + rest.reasoning, content=arguments.content + rest.content
        )


class DropsTextWithoutReasoning(FakeReasoningParser):
    def _rest(self):
        rest = super()._rest()
        return ReasoningDelta(reasoning=rest.reasoning, content=rest.content.lstrip("H"))


class HasOtherMarkers(FakeReasoningParser):
    def markers(self):
        return ReasoningMarkers(start="<because>", end="</because>")


MUTANTS = [
    ("tool_parser", WaitsForTheWholeCall, "its arguments as they follow"),
    ("tool_parser", CallsUnknownFunctions, "a tool call to a function that is not offered"),
    ("tool_parser", DropsMarkersInContent, "example must contain one tool call"),
    ("tool_parser", DependsOnPieces, "but the whole text gives"),
    ("tool_parser", ForcesAnotherFormat, "built from call_text"),
    ("tool_parser", RepeatsCallIds, "must return a new id each time"),
    ("reasoning_parser", KeepsTheMarker, "example must have the reasoning"),
    ("reasoning_parser", WaitsForTheWholeReasoning, "the reasoning as it is generated"),
    ("reasoning_parser", DropsTextWithoutReasoning, "has no marker, but gives the parts"),
    ("reasoning_parser", HasOtherMarkers, "which has the markers, gives the parts"),
    ("grammar", grammar_with(fill_bitmask=allow_everything), "fill_bitmask allows the id"),
    ("grammar", grammar_with(fill_bitmask=lambda self, words: None), "at least one token"),
    ("grammar", grammar_with(rollback=lambda self, num_tokens: None), "rollback must restore"),
    ("grammar", grammar_with(accept=lambda self, token_ids: len(token_ids)), "not allowed"),
    ("grammar", grammar_with(accept=lambda self, token_ids: 0), "return 1 for one allowed token"),
    ("grammar", AcceptsAnyForm, "a form that is not in `forms`"),
    ("step_extension", ReadsOtherRows, "must not depend on other rows"),
    ("step_extension", IgnoresGeneratedTokens, "after a preemption"),
    ("step_extension", AcceptsEveryRequest, "request without extra_args"),
    ("step_extension", DropsHiddenStates, "with the shape"),
    ("step_extension", RestoresBannedTokens, "must not change logits of -inf"),
    ("logits_processor", ChangesEveryRow, "does not use the processor"),
    ("logits_processor", AllowsBannedTokens, "must not change logits of -inf"),
    ("logits_processor", BansEveryToken, "at least one finite logit"),
    ("logits_processor", DependsOnOtherRows, "other rows of the batch"),
    ("logits_processor", IgnoresEarlierTokens, "the same logits after a preemption"),
    ("logits_processor", RejectsEveryRequest, "with example_args; expected True"),
    ("logits_processor", StaysAfterLeave, "does not use the processor"),
    ("logits_processor", CountsCalls, "without accept between them"),
    ("logits_processor", ReturnsFloat16, "dtype"),
    ("io_processor", DependsOnEarlierCalls, "depend on earlier calls"),
    ("io_processor", ChangesData, "must not change the data"),
    ("io_processor", AcceptsInvalidData, "must raise RequestError for invalid data"),
    ("io_processor", ReturnsNoBatch, "expected an IOBatch"),
    ("io_processor", HidesErrors, "must return another result if a prompt has failed"),
    ("io_processor", ChangesOutputs, "must not change the outputs"),
    ("stat_logger", Prints, "must not print to stdout"),
    ("stat_logger", ClosesOnce, "closed twice"),
    ("stat_logger", DividesByZero, "ZeroDivisionError"),
    ("stat_logger", BlocksTheEngine, "delays the engine"),
    ("hooks", ImplementsNoHook, "must override at least one of the hooks"),
    ("hooks", RaisesInAHook, "failed in on_step"),
    ("hooks", MisspellsAHook, "Did you mean 'on_request_error'"),
    ("worker_extension", DefinesInit, "__init__ is a special method"),
    ("worker_extension", OverridesAWorkerMethod, "load_model is also a member of"),
    ("worker_extension", HasNoPublicMethod, "must have a public method"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("kind", "mutant", "law"), MUTANTS)
def test_a_faulty_extension_is_detected(kind, mutant, law):
    on_device = ("logits_processor", "step_extension")
    arguments = (torch.device("cpu"),) if kind in on_device else ()
    with pytest.raises(AssertionError, match=re.escape(law)):
        load_suite(kind)(mutant, *arguments)
