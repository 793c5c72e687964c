"""The engine for one's own loop: requests in, outputs out, one step at a time.

Joins the engine core to text: input processor before it, output processor behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dovetail.config import EngineArgs
from dovetail.config.model_directory import default_sampling_params, eos_token_ids
from dovetail.engine.input_processor import InputFacts, InputProcessor
from dovetail.engine.listeners import Listeners
from dovetail.engine.output_processor import OutputProcessor
from dovetail.engine.plugin_picks import check_picks, make_registry
from dovetail.engine.prompt_reading import prompt_text
from dovetail.engine.start import StartedEngine, start_engine
from dovetail.errors import RequestError, UserError
from dovetail.hooks import load_hooks
from dovetail.interfaces import IOProcessor, IOProcessorContext, PauseScope
from dovetail.outputs import RequestOutputKind
from dovetail.plugins import PluginRegistry
from dovetail.plugins.instance import Options, make_instance

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.inputs import Prompt
    from dovetail.interfaces import SchedulerStats, Tokenizer
    from dovetail.outputs import RequestOutput
    from dovetail.request import EngineCoreRequest
    from dovetail.sampling_params import SamplingParams


class LLMEngine:
    """A model that answers requests while somebody calls `step`. Not thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        """Start everything; raise a DovetailError that names the part at fault."""
        self.plugins = make_registry(config)
        # Before the tokenizer: a wrong name is told at once, whatever the size of its files.
        check_picks(config, self.plugins)
        hooks = load_hooks(config.extensions.hooks, self.plugins)
        self.tokenizer = _load_tokenizer(config, self.plugins)
        self._started: StartedEngine = start_engine(config, plugins=self.plugins)
        self.config = self._started.config
        self.max_model_len = self._started.max_model_len
        self.vocab_size = self._started.model_info.vocab_size
        self.last_stats: SchedulerStats | None = None
        self._core = self._started.core
        model = self.config.model
        self._inputs = InputProcessor(
            InputFacts(
                vocab_size=self._started.model_info.vocab_size,
                max_model_len=self.max_model_len,
                eos_token_ids=self._eos_token_ids(),
                max_logprobs=model.max_logprobs,
                default_sampling=default_sampling_params(model.generation_config),
                seed=model.seed,
            ),
            tokenizer=self.tokenizer,
            clock=self._started.clock,
        )
        self._outputs = OutputProcessor(self.tokenizer, clock=self._started.clock)
        self._ended_early: list[RequestOutput] = []
        try:
            self.io_processor = self._make_io_processor()
            self._listeners = Listeners(self.config, self.plugins, hooks, self._started.clock)
        except BaseException:
            self._core.shutdown()
            raise
        ahead = self.config.scheduler.async_scheduling
        self._step = self._listeners.watch(
            self._core.step_with_batch_queue if ahead else self._core.step
        )

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Start an engine from flat options."""
        return cls(args.create_engine_config())

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can be asked for."""
        return self._started.model_info.supported_tasks

    def default_sampling_params(self) -> SamplingParams:
        """Return what a request gets that brings no parameters: the model's own defaults."""
        return self._inputs.default_params()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> None:
        """Take a request in. Raise RequestError, naming the parameter; all others go on."""
        if "generate" not in self.supported_tasks:
            raise UserError(
                f"{self.config.model.architecture} cannot generate; it supports: "
                f"{', '.join(self.supported_tasks)}."
            )
        try:
            requests = self._inputs.process(
                request_id, prompt, params, priority=priority, cache_salt=cache_salt
            )
            self._take_in(request_id, requests, prompt_text(prompt), output_kind)
        except RequestError as error:
            self._listeners.request_failed(request_id, error)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs that are due, finished ones among them."""
        outputs, self._ended_early = self._ended_early, []
        if not self._core.has_work():
            return outputs
        given = self._step()
        if given is not None:
            self.last_stats = given.stats or self.last_stats
            processed = self._outputs.process(given)
            if processed.to_abort:
                self._core.abort_requests(processed.to_abort)
            outputs += processed.request_outputs
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; the next step returns their last outputs. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        processed = self._outputs.abort(ids)
        self._core.abort_requests(processed.to_abort)
        self._ended_early += processed.request_outputs

    def discard_ended(self, request_ids: Iterable[str]) -> None:
        """Let nobody hear of the ends of these aborted requests."""
        unwanted = set(request_ids)
        self._ended_early = [out for out in self._ended_early if out.request_id not in unwanted]

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` still has something to bring."""
        return bool(self._outputs.num_unfinished or self._ended_early)

    @property
    def paused(self) -> PauseScope | None:
        """How far the engine is paused, or None."""
        return self._core.paused

    def pause(self, scope: PauseScope | str = PauseScope.ALL) -> None:
        """Hold requests where they are until `resume`; they can be added and aborted all the same.

        scope: "all": nothing runs, and everything keeps its place; or "new": those that have begun
        run on to their end, and nobody else begins. `step` then returns at once if nothing is to
        be done. Raises UserError for any other scope.
        """
        if scope not in tuple(PauseScope):
            raise UserError(f"scope={scope!r} is no scope of a pause; it can be 'all' or 'new'.")
        self._core.pause(PauseScope(scope))

    def resume(self) -> None:
        """Lift a pause; do nothing if there is none."""
        self._core.resume()

    def collective_rpc(self, operation: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker and return the answers by rank."""
        return self._core.executor.collective_rpc(operation, args=args, kwargs=kwargs)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False if requests are under way."""
        return self._core.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the engine. May be called twice."""
        try:
            self._listeners.stop()
        finally:
            self._core.shutdown()

    def _take_in(
        self,
        request_id: str,
        requests: list[EngineCoreRequest],
        prompt: str | None,
        kind: RequestOutputKind,
    ) -> None:
        self._outputs.add_request(request_id, requests, prompt=prompt, kind=kind)
        try:
            for request in requests:
                self._core.add_request(request)
        except BaseException:
            self._core.abort_requests(self._outputs.abort([request_id]).to_abort)
            raise

    def _make_io_processor(self) -> IOProcessor | None:
        reference = self.config.extensions.io_processor
        if reference is None:
            return None

        def context(own: Options) -> IOProcessorContext:
            return IOProcessorContext(
                config=self.config,
                tokenizer=self.tokenizer,
                default_sampling=self.default_sampling_params(),
                options=own,
            )

        made: IOProcessor = make_instance(self.plugins, "io_processor", reference, context)
        return made

    def _eos_token_ids(self) -> frozenset[int]:
        model = self.config.model
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        known = eos_token_ids(model.hf_config, model.generation_config)
        return known if own is None else known | {own}


def _load_tokenizer(config: EngineConfig, plugins: PluginRegistry) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    reference = "huggingface" if model.tokenizer_mode == "auto" else model.tokenizer_mode
    tokenizer_cls = plugins.load("tokenizer", reference)
    options = plugins.options_of("tokenizer", tokenizer_cls)
    given = {"options": options} if options else {}
    tokenizer: Tokenizer = tokenizer_cls.from_directory(model.tokenizer_dir, **given)
    return tokenizer
