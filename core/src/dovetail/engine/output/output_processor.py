"""Turns the core's output columns into users' outputs: text, stop strings, completions.

Only this module groups the completions of a request and searches for stop strings; it returns the
requests that the engine must abort because of them. This module does not depend on scheduling.
Tokens of unknown requests are dropped: an aborted request may still get tokens from plans in
flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.clock import Clock
from dovetail.engine.output.completion import Completion, LogprobTexts
from dovetail.errors import RequestError
from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.logprobs import LogprobStore
from dovetail.outputs import LogprobSequence, RequestMetrics, RequestOutput, RequestOutputKind
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import PooledTensor


@dataclass(slots=True, kw_only=True)
class ProcessedOutputs:
    """The outputs of one step.

    request_outputs: the outputs for the users. to_abort: the core's ids of requests that the engine
    must abort.
    """

    request_outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class DueGroups:
    """The processed results of one step, before outputs are created.

    due: groups with a new output. to_abort: as in `ProcessedOutputs`.
    """

    due: list[CompletionGroup]
    to_abort: list[str]

    def processed(self) -> ProcessedOutputs:
        """Create the outputs and return them."""
        outputs = [group.output() for group in self.due]
        return ProcessedOutputs(request_outputs=outputs, to_abort=self.to_abort)


class CompletionGroup:
    """The completions of one user's request, and their common data.

    The output processor owns it. Other code reads `request_id`, `first` (the core's request of
    the first completion), `first_token_ns` and `num_open` (unfinished completions), and calls
    `output`. error: the error message, or None. pooled: the result of a pooling request, which sets
    `first_token_ns`.
    """

    __slots__ = (
        "_metrics",
        "_prompt_token_ids",
        "admitted_ns",
        "completions",
        "error",
        "finished_ns",
        "first",
        "first_token_ns",
        "kind",
        "num_cached_tokens",
        "num_open",
        "pooled",
        "prompt",
        "prompt_logprobs",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        completions: list[Completion],
        prompt: str | None,
        kind: RequestOutputKind,
        texts: LogprobTexts,
    ) -> None:
        self.request_id = request_id
        self.completions = completions
        self.prompt = prompt
        self.kind = kind
        self.first = completions[0].request
        self.num_open = len(completions)
        self.num_cached_tokens = 0
        self.prompt_logprobs: LogprobStore | None = None
        if self.first.sampling_params.prompt_logprobs is not None:
            self.prompt_logprobs = LogprobStore(texts.of(self.first.sampling_params))
            self.prompt_logprobs.add_unknown()
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        self.finished_ns: int | None = None
        self.error: str | None = None
        self.pooled: PooledTensor | None = None
        self._prompt_token_ids: list[int] | None = None
        self._metrics: RequestMetrics | None = None

    def output(self) -> RequestOutput:
        """Return the next output, with the content that the group's kind requires.

        With DELTA it contains everything since the last output.
        """
        if self.kind is RequestOutputKind.DELTA:
            outputs = [
                completion.new_output()
                for completion in self.completions
                if completion.has_new_outputs
            ]
        else:
            outputs = [completion.output() for completion in self.completions]
        prompt_logprobs = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = LogprobSequence(self.prompt_logprobs)
            if self.kind is RequestOutputKind.DELTA:
                self.prompt_logprobs = None
        if self._prompt_token_ids is None:
            self._prompt_token_ids = list(self.first.prompt_token_ids)
        metrics = self._metrics
        if metrics is None:
            arrival_ns = self.first.arrival_ns
            metrics = RequestMetrics(
                arrival_ns, self.first_token_ns, self.finished_ns, self.admitted_ns
            )
            # The object is reused until the request ends.
            self._metrics = metrics if self.first_token_ns is not None else None
        elif not self.num_open:
            metrics = RequestMetrics(
                metrics.arrival_ns, metrics.first_token_ns, self.finished_ns, self.admitted_ns
            )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self._prompt_token_ids,
            outputs,
            not self.num_open,
            metrics,
            prompt_logprobs,
            self.num_cached_tokens,
            self.error,
            self.pooled,
        )


class OutputProcessor:
    """Stores the unfinished requests and turns each step's columns into outputs."""

    def __init__(self, tokenizer: Tokenizer | None, *, clock: Clock) -> None:
        """Create the processor. tokenizer: None for outputs without text."""
        self._tokenizer = tokenizer
        self._clock = clock
        self._logprob_texts = LogprobTexts(tokenizer)
        self._groups: dict[str, CompletionGroup] = {}
        # By the core's ids: all unfinished completions; and the token list of each completion to
        # which new tokens need only be appended, so that a token costs one look-up.
        self._open: dict[str, tuple[CompletionGroup, Completion]] = {}
        self._quiet: dict[str, list[int]] = {}

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests of users."""
        return len(self._groups)

    def add_request(
        self,
        request_id: str,
        requests: Sequence[EngineCoreRequest],
        *,
        prompt: str | None = None,
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> CompletionGroup:
        """Register the completions of one user's request.

        requests: the result of `InputProcessor.process`, one per completion. prompt: the text of
        the prompt, or None for token ids. Raises RequestError if one of the ids is in use.
        """
        self.check_unused(request_id, *(request.request_id for request in requests))
        texts = self._logprob_texts
        completions = [
            Completion(request, index, self._tokenizer, texts)
            for index, request in enumerate(requests)
        ]
        group = CompletionGroup(request_id, completions, prompt, kind, texts)
        self._groups[request_id] = group
        for completion in completions:
            core_id = completion.request.request_id
            self._open[core_id] = group, completion
            if completion.is_plain and kind is RequestOutputKind.FINAL_ONLY:
                self._quiet[core_id] = completion.token_ids
        return group

    def check_unused(self, *names: str) -> None:
        """Raise RequestError if one of these ids is in use."""
        for name in names:
            if name in self._groups or name in self._open:
                raise RequestError(
                    f"request_id={name!r} is in use by an unfinished request; choose another id.",
                    parameter="request_id",
                )

    def process(self, outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Process the outputs of a step. Return the users' outputs, in the order of the tokens."""
        return self.process_chunk(outputs).processed()

    def process_chunk(self, outputs: EngineCoreOutputs) -> DueGroups:
        """Process a chunk of a step's outputs. The caller decides when outputs are created."""
        to_abort: list[str] = []
        now_ns = self._clock.now_ns()
        touched: dict[CompletionGroup, None] = {}
        if outputs.num_cached_tokens or outputs.prompt_logprobs:
            self._take_prompt_facts(outputs)
        for core_id, pooled in outputs.pooled.items():
            if (opened := self._open.get(core_id)) is not None:
                opened[0].pooled, opened[0].first_token_ns = pooled, now_ns
        self._take_tokens(outputs, now_ns, touched, to_abort)
        for ending in outputs.finished:
            if (entry := self._open.get(ending.request_id)) is not None:
                group, completion = entry
                completion.finish(ending)
                if ending.reason is FinishReason.ERROR:
                    group.error = ending.message or "The engine reported no reason."
                self._close(group, completion, now_ns)
                touched[group] = None
        due = [
            group
            for group in touched
            if not (group.num_open and group.kind is RequestOutputKind.FINAL_ONLY)
        ]
        return DueGroups(due=due, to_abort=to_abort)

    def abort(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """Abort requests. Return their final outputs and the ids that the engine must abort.

        Unknown and finished ids are ignored.
        """
        return self.end(request_ids).processed()

    def end(self, request_ids: Iterable[str], error: str | None = None) -> DueGroups:
        """End requests as `abort` does, without creating outputs. error: the cause, for users."""
        ended = DueGroups(due=[], to_abort=[])
        now_ns = self._clock.now_ns()
        for request_id in request_ids:
            if (group := self._groups.get(request_id)) is None:
                continue
            for completion in group.completions:
                core_id = completion.request.request_id
                if core_id in self._open:
                    completion.finish(Finished(request_id=core_id, reason=FinishReason.ABORT))
                    self._close(group, completion, now_ns)
                    ended.to_abort.append(core_id)
            group.error = error
            ended.due.append(group)
        return ended

    def _take_prompt_facts(self, outputs: EngineCoreOutputs) -> None:
        """Store each prompt's data, from the first completion. All completions have equal data."""
        for core_id, num_cached in outputs.num_cached_tokens.items():
            entry = self._open.get(core_id)
            if entry is not None and entry[1].index == 0:
                entry[0].num_cached_tokens = num_cached
                entry[0].admitted_ns = outputs.admitted_ns.get(core_id)
        for core_id, columns in outputs.prompt_logprobs.items():
            entry = self._open.get(core_id)
            if entry is None or entry[1].index or entry[0].prompt_logprobs is None:
                continue
            entry[0].prompt_logprobs.extend(columns)

    def _take_tokens(
        self,
        outputs: EngineCoreOutputs,
        now_ns: int,
        touched: dict[CompletionGroup, None],
        to_abort: list[str],
    ) -> None:
        tokens, quiet, opened, logprobs = (
            outputs.token_ids,
            self._quiet,
            self._open,
            outputs.logprobs,
        )
        endings = {ending.request_id: ending for ending in outputs.finished}
        end = 0
        for core_id, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            start, end = end, end + count
            if sink := quiet.get(core_id):
                sink.extend(tokens[start:end])
                continue
            if not count or (entry := opened.get(core_id)) is None:
                continue
            group, completion = entry
            if group.first_token_ns is None:
                group.first_token_ns = now_ns
            touched[group] = None
            if completion.is_plain:
                if count == 1:
                    completion.token_ids.append(tokens[start])
                else:
                    completion.token_ids.extend(tokens[start:end])
                continue
            columns = logprobs.get(core_id) if logprobs else None
            ending = endings.get(core_id) if endings else None
            if completion.append(tokens[start:end], columns, ending):
                self._close(group, completion, now_ns)
                if ending is None:
                    to_abort.append(core_id)

    def _close(self, group: CompletionGroup, completion: Completion, now_ns: int) -> None:
        """Remove an ended completion, and the group after its last completion."""
        core_id = completion.request.request_id
        del self._open[core_id]
        self._quiet.pop(core_id, None)
        group.num_open -= 1
        if not group.num_open:
            group.finished_ns = now_ns
            del self._groups[group.request_id]
