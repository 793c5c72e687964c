"""Structured output: compiles grammars in threads, and creates the bit masks of each step.

An admission gate holds a request until its grammar is compiled. Then the request has a matcher,
which reads every token that is generated for it. This module does not depend on a grammar plugin or
on tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

from dovetail.config import EngineConfig
from dovetail.config.resolve import GRAMMAR_FIELD
from dovetail.engine.input.tokenizer_checks import load_tokenizer
from dovetail.engine.reasoning import ReasoningMatcher
from dovetail.errors import ContractError, RequestError
from dovetail.interfaces import (
    AdmissionGate,
    EngineCoreOutputs,
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarOutput,
    GrammarSpec,
    SchedulerInterface,
    Tokenizer,
)
from dovetail.plan import SchedulerOutput
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.construction import Options, make_instance
from dovetail.plugins.containment import describe_failure
from dovetail.processes.thread_priority import lower_thread_priority
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import ReasoningParams
from dovetail.value_checks import shorten

_NUM_THREADS = 2


def _answer_matcher(matcher: GrammarMatcher) -> GrammarMatcher | None:
    """Return the plugin's matcher that determines the next mask, or None if there is none."""
    if isinstance(matcher, ReasoningMatcher):
        return matcher.answer if matcher.in_answer else None
    return matcher


def make_structured_output(
    config: EngineConfig,
    plugins: PluginRegistry,
    scheduler_cls: type[SchedulerInterface],
    vocab_size: int,
) -> StructuredOutput | None:
    """Return the structured output of an engine, or None if the user names no grammar plugin.

    Raises PluginError if the plugin cannot be loaded or created, and ContractError for a scheduler
    without gates, which would not wait for grammars.
    """
    reference = config.extensions.grammar_backend
    if reference is None:
        return None
    is_automatic = any(change.field == GRAMMAR_FIELD for change in config.changes)
    if "gates" not in declared_ids(scheduler_cls, "provides"):
        if is_automatic:
            return None
        raise ContractError(
            f"grammar_backend is set, but the scheduler {scheduler_cls.__qualname__} would not "
            "wait for grammars, because its `provides` does not contain 'gates'. Choose another "
            "scheduler_cls, or omit grammar_backend."
        )

    def tokenizer() -> Tokenizer | None:
        return load_tokenizer(config, plugins)

    def make(tokenizer: Tokenizer | None) -> GrammarBackend:
        def context(options: Options) -> GrammarContext:
            return GrammarContext(tokenizer=tokenizer, vocab_size=vocab_size, options=options)

        instance: GrammarBackend = make_instance(plugins, "grammar", reference, context)
        return instance

    parts = GrammarParts(tokenizer, make)
    structured = StructuredOutput(plugins.load("grammar", reference), parts, vocab_size)
    if not is_automatic:
        parts.backend()
    return structured


def check_structured_output(
    request: EngineCoreRequest, structured_output: StructuredOutput | None
) -> None:
    """Raise RequestError if the engine does not support the request's structured output."""
    params = request.sampling_params
    structured = params.structured_outputs
    if structured is None and params.reasoning is None:
        return
    if structured_output is None:
        name = "reasoning" if structured is None else "structured_outputs"
        raise RequestError(
            f"{name} needs a grammar plugin, but this engine has none. Set grammar_backend when "
            f"you start the engine, or omit {name}.",
            parameter=name,
        )
    if structured is None:
        return
    forms = structured_output.backend_cls.forms
    if structured.form not in forms:
        raise RequestError(
            f"structured_outputs.form={shorten(structured.form)} is not a form of the grammar "
            f"plugin {structured_output.backend_cls.__name__}; use one of "
            f"{', '.join(sorted(forms))}.",
            parameter="structured_outputs.form",
        )
    if not request.stop_token_ids:
        raise RequestError(
            "structured_outputs needs a token that ends the text, but this model has none. Set "
            "stop_token_ids.",
            parameter="structured_outputs",
        )


class GrammarParts:
    """The tokenizer and the grammar plugin of an engine. Each is created once, at its first use."""

    def __init__(
        self,
        load: Callable[[], Tokenizer | None],
        make: Callable[[Tokenizer | None], GrammarBackend],
    ) -> None:
        self._load = load
        self._make = make
        self._lock = threading.RLock()
        self._tokenizer: tuple[Tokenizer | None] | None = None
        self.made: GrammarBackend | None = None

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer, or None if the engine has none."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = (self._load(),)
            return self._tokenizer[0]

    def backend(self) -> GrammarBackend:
        """Return the grammar plugin."""
        with self._lock:
            if self.made is None:
                self.made = self._make(self.tokenizer())
            return self.made


class StructuredOutput(AdmissionGate):
    """Compiles grammars in its own threads. Call its methods in the engine's thread.

    backend_cls: the class of the grammar plugin, which is created for the first grammar.
    """

    def __init__(
        self, backend_cls: type[GrammarBackend], parts: GrammarParts, vocab_size: int
    ) -> None:
        """Create the gate. parts: creates the plugin."""
        self.backend_cls = backend_cls
        self._parts = parts
        self._row_bytes = 4 * ((vocab_size + 31) // 32)
        self._threads = ThreadPoolExecutor(
            _NUM_THREADS, thread_name_prefix="dovetail-grammar", initializer=lower_thread_priority
        )
        self._compiling: dict[str, Future[GrammarMatcher]] = {}
        self._failed: list[tuple[str, str]] = []
        self._matchers: dict[str, GrammarMatcher] = {}
        self._names: dict[int, str] = {}
        self._errors: dict[str, str] = {}
        self._masks: dict[int, tuple[Mapping[int, str], GrammarOutput]] = {}

    def holds(self, request: EngineCoreRequest) -> bool:
        """Start compiling the request's grammar. Return whether it has one to wait for."""
        params = request.sampling_params
        structured, spec = params.structured_outputs, None
        if structured is not None:
            spec = GrammarSpec(
                form=structured.form, text=structured.text, stop_token_ids=request.stop_token_ids
            )
            if params.reasoning is None and (matcher := self._find(spec)) is not None:
                self._matchers[request.request_id] = matcher
                return False
        elif params.reasoning is None or params.reasoning.budget is None:
            return False
        compiling = self._threads.submit(self._compile, spec, params.reasoning)
        self._compiling[request.request_id] = compiling
        return True

    def _find(self, spec: GrammarSpec) -> GrammarMatcher | None:
        """Return a matcher for an already compiled grammar, or None."""
        if self._parts.made is None:
            return None
        with contextlib.suppress(Exception):  # `compile` raises it, too
            return self._parts.made.find(spec)
        return None

    def _compile(
        self, spec: GrammarSpec | None, reasoning: ReasoningParams | None
    ) -> GrammarMatcher:
        matcher = None if spec is None else self._parts.backend().compile(spec)
        if reasoning is None:
            assert matcher is not None
            return matcher
        tokenizer = self._parts.tokenizer()
        if tokenizer is None:
            raise RequestError(
                "reasoning requires a tokenizer; start the engine without skip_tokenizer_init.",
                parameter="reasoning",
            )
        return ReasoningMatcher(matcher, reasoning, tokenizer)

    def take_ready(self) -> Sequence[str]:
        """Return the requests whose grammars have been compiled since the last call."""
        ready = []
        for name in [name for name, item in self._compiling.items() if item.done()]:
            try:
                self._matchers[name] = self._compiling.pop(name).result()
                ready.append(name)
            except RequestError as error:
                self._failed.append((name, f"structured_outputs: {error}"))
            except Exception as error:
                failure = describe_failure(error)
                message = f"the grammar plugin failed to compile structured_outputs: {failure}"
                self._failed.append((name, message))
        return ready

    def take_failed(self) -> Sequence[tuple[str, str]]:
        """Return the requests whose grammars cannot be compiled, with the reason."""
        failed, self._failed = self._failed, []
        return failed

    def forget(self, request_id: str) -> None:
        """Remove a request that is held while its grammar is compiled."""
        compiling = self._compiling.pop(request_id, None)
        if compiling is not None:
            compiling.cancel()
        self._failed = [item for item in self._failed if item[0] != request_id]
        self.end((request_id,))

    def end(self, request_ids: Iterable[str]) -> None:
        """Remove the state of requests that have ended."""
        for name in request_ids:
            self._matchers.pop(name, None)
            self._errors.pop(name, None)

    def constrains(self, plan: SchedulerOutput) -> bool:
        """Record the requests' batch slots. Return whether a grammar constrains `plan`."""
        if not (self._matchers or self._names):
            return False
        for row in plan.leaves:
            self._names.pop(row, None)
        for request in plan.joins:
            if request.request_id in self._matchers:
                self._names[request.row] = request.request_id
        runs = zip(plan.rows, plan.samples, strict=True)
        return any(samples and row in self._names for row, samples in runs)

    def mask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Return the bit masks of `plan`, the plan most recently passed to `constrains`.

        Call it after `accept` has received the results of all earlier plans.
        """
        if not self._names:
            return None
        names: dict[int, str] = {}
        for run, (row, samples) in enumerate(zip(plan.rows, plan.samples, strict=True)):
            name = self._names.get(row) if samples else None
            matcher = self._matchers.get(name) if name is not None else None
            if name is None or matcher is None:
                continue
            if not isinstance(matcher, ReasoningMatcher) or matcher.masks:
                names[run] = name
        if not names:
            return None
        bitmask = self._fill(list(names.values()))
        created = GrammarOutput(runs=tuple(names), bitmask=bytes(bitmask))
        self._masks[plan.step_id] = names, created
        return created

    def _fill(self, names: Sequence[str]) -> bytearray:
        """Return the masks of requests. A request whose mask has no token is recorded as failed."""
        size = self._row_bytes
        bitmask = bytearray(size * len(names))
        matchers = [_answer_matcher(self._matchers[name]) for name in names]
        try:
            if None in matchers:
                raise ValueError("a matcher was replaced, so its mask is filled separately")
            plain = [matcher for matcher in matchers if matcher is not None]
            self._parts.backend().fill_bitmasks(plain, memoryview(bitmask))
        except Exception:  # fill each mask, and find the request whose matcher fails
            bitmask = bytearray(size * len(names))
            for index, name in enumerate(names):
                words = memoryview(bitmask)[index * size : (index + 1) * size]
                try:
                    self._matchers[name].fill_bitmask(words)
                except Exception as error:
                    failure = describe_failure(error)
                    self._fail(name, f"the request's grammar failed in fill_bitmask: {failure}")
        for index, name in enumerate(names):
            row = slice(index * size, (index + 1) * size)
            if not any(bitmask[row]):
                self._fail(name, "the request's grammar allows no token")
                bitmask[row] = b"\xff" * size  # the token sampled with this mask is not used
        return bitmask

    def run_errors(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, str]:
        """Return errors by index of the request in the plan: failed matchers, and forbidden tokens.

        Call it once for each plan, before the scheduler gets the result.
        """
        names, mask = self._masks.pop(plan.step_id, (None, None))
        if not names or mask is None:
            return {}
        firsts = [0, *accumulate(result.num_sampled)]
        for index, (run, name) in enumerate(names.items()):
            bits = mask.bitmask[index * self._row_bytes : (index + 1) * self._row_bytes]
            for token in result.token_ids[firsts[run] : firsts[run + 1]][:1]:
                if not bits[token // 8] >> token % 8 & 1:
                    self._fail(
                        name, f"the request's grammar does not allow the sampled token {token}"
                    )
        return {run: self._errors[name] for run, name in names.items() if name in self._errors}

    def accept(self, outputs: EngineCoreOutputs) -> None:
        """Pass the tokens of a step to the matchers. Remove requests that have ended."""
        if not self._matchers:
            return
        self.end(item.request_id for item in outputs.finished)
        first = 0
        for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            first, start = first + count, first
            matcher = self._matchers.get(name)
            if matcher is None:
                continue
            tokens = outputs.token_ids[start:first]
            try:
                num_allowed = matcher.accept(tokens)
            except Exception as error:
                self._fail(
                    name, f"the request's grammar failed in accept: {describe_failure(error)}"
                )
                continue
            if num_allowed != count:
                self._fail(
                    name,
                    f"the request's grammar accepts only the first {num_allowed} of the tokens "
                    f"{list(tokens)}",
                )

    def shutdown(self) -> None:
        """Stop the threads and drop unfinished grammars. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fail(self, name: str, what: str) -> None:
        self._errors.setdefault(name, f"structured_outputs: {what}.")
