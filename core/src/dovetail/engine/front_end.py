"""The front end of an engine core: tokenizer, input and output processor, listeners.

It is created in two phases: plugin choices are checked before the core starts, and the processors
are created when the core has reported the model's sizes. `LLMEngine` and `AsyncLLM` share it. Does
not depend on a client or an event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.config.model_directory import default_sampling_params, eos_token_ids
from dovetail.config.resolve import request_of
from dovetail.engine.input.input_processor import InputFacts, InputProcessor, core_request_id
from dovetail.engine.input.pooling_checks import check_pooling, resolve_pooling
from dovetail.engine.input.pooling_inputs import PoolingInputs
from dovetail.engine.input.prompt_reading import ReadPrompt, read_prompt
from dovetail.engine.input.request_checks import check_place, check_request_id
from dovetail.engine.input.tokenizer_checks import load_tokenizer, usable_eos_token_ids
from dovetail.engine.listeners import Listeners
from dovetail.engine.messages.parsers import MessageParsers
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.engine.plugin_choices import check_plugin_choices, make_registry
from dovetail.errors import DovetailError, RequestError, UserError
from dovetail.interfaces import IOProcessor, IOProcessorContext, Tokenizer
from dovetail.outputs import RequestOutputKind
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import Options, make_instance
from dovetail.plugins.hooks import HookPlugins, load_hooks
from dovetail.plugins.loading import paused_garbage_collection
from dovetail.plugins.selection import prepare_platform
from dovetail.pooling_params import PoolingParams
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import plain_text, shorten

if TYPE_CHECKING:
    from dovetail.clock import Clock
    from dovetail.config import RequestedConfig
    from dovetail.engine.channel import EngineFacts
    from dovetail.engine.output.output_processor import CompletionGroup
    from dovetail.inputs import Prompt
    from dovetail.request import EngineCoreRequest


@dataclass(frozen=True, kw_only=True)
class UserRequest:
    """A user's request: the arguments of `LLMEngine.add_request`.

    pooling_params: if given, the request is a pooling request, and `params` is None.

    Instances of subclasses of str become plain strings, so that no method of a caller's class is
    called later.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    pooling_params: PoolingParams | None = None

    def __post_init__(self) -> None:
        for name in ("request_id", "cache_salt"):
            value = getattr(self, name)
            if type(value) is not str and issubclass(type(value), str):
                object.__setattr__(self, name, plain_text(value))


@dataclass(frozen=True, kw_only=True)
class CheckedRequest:
    """A user's request after the fast checks.

    read: the prompt. core_id: the request's id in the engine core. arrival_ns: time on the front
    end's clock.
    """

    user_request: UserRequest
    read: ReadPrompt
    core_id: str
    arrival_ns: int


@dataclass(frozen=True, kw_only=True)
class FrontEndParts:
    """The parts that a front end needs before its core starts.

    tokenizer: None if the engine has no tokenizer.
    """

    plugins: PluginRegistry
    hooks: HookPlugins
    tokenizer: Tokenizer | None

    @classmethod
    @paused_garbage_collection()
    def of(cls, config: RequestedConfig, *, starts_engine: bool = False) -> FrontEndParts:
        """Check the plugin choices. Load hooks and tokenizer.

        starts_engine: whether the engine starts in this process; then its platform prepares for
        that in the background while the tokenizer is loaded. Raises a DovetailError if a plugin
        cannot be used.
        """
        plugins = make_registry(config)
        # Checked before the tokenizer is loaded, so that an invalid name is reported immediately.
        check_plugin_choices(config, plugins)
        if starts_engine:
            with suppress(DovetailError):  # the engine's start raises it again, with its phase
                prepare_platform(plugins, config)
        hooks = load_hooks(config.extensions.hooks, plugins)
        return cls(plugins=plugins, hooks=hooks, tokenizer=load_tokenizer(config, plugins))

    @classmethod
    def of_engine(cls, info: EngineFacts) -> FrontEndParts:
        """Return the parts for another front end of a running engine."""
        return cls.of(request_of(info.config))


class FrontEnd:
    """The front end of a started core. Not thread-safe. The owner stops the listeners."""

    def __init__(self, prepared: FrontEndParts, info: EngineFacts, clock: Clock) -> None:
        """Create the processors and listeners. Raise a DovetailError if one fails."""
        self.facts = info
        self.tokenizer = prepared.tokenizer
        self._plugins = prepared.plugins
        model = info.config.model
        self._clock = clock
        self._num_checked = 0
        vocab_size = info.model_info.vocab_size
        known = eos_token_ids(model.hf_config, model.generation_config)
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        self.inputs = InputProcessor(
            InputFacts(
                vocab_size=vocab_size,
                max_model_len=info.max_model_len,
                eos_token_ids=usable_eos_token_ids(known, own, vocab_size),
                max_logprobs=model.max_logprobs,
                default_sampling=default_sampling_params(model.generation_config),
                seed=model.seed + (info.front_end << 64),  # each front end uses different seeds
                limits=info.config.limits,
            ),
            tokenizer=self.tokenizer,
            clock=clock,
        )
        self.pooling_inputs = PoolingInputs(self.inputs, self.tokenizer)
        self.outputs = OutputProcessor(self.tokenizer, clock=clock)
        self.parsers = MessageParsers.of(info.config, self._plugins, self.tokenizer)
        self.io_processor = self._make_io_processor()
        config = info.config
        if info.front_end:  # only the owner of the engine runs stat loggers
            none = config.extensions.model_copy(update={"stat_loggers": ()})
            config = config.model_copy(update={"extensions": none})
        self.listeners = Listeners(config, prepared.plugins, prepared.hooks, clock)

    def check_can_generate(self) -> None:
        """Raise UserError, listing the supported tasks, unless the model generates text."""
        tasks = self.facts.model_info.supported_tasks
        if "generate" not in tasks:
            raise UserError(
                f"The model {self.facts.config.model.architecture} does not support text "
                f"generation; it supports: {', '.join(tasks)}."
            )

    def make(self, user_request: UserRequest) -> tuple[CheckedRequest, list[EngineCoreRequest]]:
        """Check a user's request and create the core's requests for it.

        Raises RequestError, naming the parameter, for an invalid request. Registers nothing.
        """
        checked = self.check(user_request)
        return checked, self.complete(checked, self.prepare(checked))

    def check(self, user_request: UserRequest) -> CheckedRequest:
        """Run the fast checks. Raise RequestError, naming the parameter, if one fails."""
        if user_request.pooling_params is None:
            self.check_can_generate()
        else:
            pooling = resolve_pooling(user_request.pooling_params, self.facts.model_info)
            user_request = replace(user_request, pooling_params=pooling)
        limits = self.facts.config.limits
        request_id = check_request_id(user_request.request_id, limits)
        check_place(
            priority=user_request.priority, cache_salt=user_request.cache_salt, limits=limits
        )
        if not isinstance(user_request.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind={shorten(user_request.output_kind)} is not a RequestOutputKind; use "
                f"{', '.join(f'RequestOutputKind.{kind.name}' for kind in RequestOutputKind)}.",
                parameter="output_kind",
            )
        read = read_prompt(user_request.prompt, limits)
        # The core's id is never used again: tokens of an aborted request may still arrive, and
        # must not be assigned to a later request with the same id.
        self._num_checked += 1
        params = user_request.params
        if isinstance(params, SamplingParams) and type(params) is not SamplingParams:
            params = params.own_copy()  # a subclass may have fields of any type
        return CheckedRequest(
            user_request=replace(user_request, request_id=request_id, params=params),
            read=read,
            core_id=core_request_id(request_id, self._num_checked),
            arrival_ns=self._clock.now_ns(),
        )

    def prepare(self, checked: CheckedRequest) -> EngineCoreRequest:
        """Run the slow checks and tokenize. May run in another thread.

        Raises RequestError for an invalid request.
        """
        user_request = checked.user_request
        if user_request.pooling_params is not None:
            return self._prepare_pooling(checked, user_request.pooling_params)
        return self.inputs.prepare(
            checked.core_id,
            checked.read,
            user_request.params,
            priority=user_request.priority,
            cache_salt=user_request.cache_salt,
            arrival_ns=checked.arrival_ns,
        )

    def _prepare_pooling(
        self, checked: CheckedRequest, pooling: PoolingParams
    ) -> EngineCoreRequest:
        request = self.pooling_inputs.prepare(
            checked.core_id,
            checked.read,
            pooling,
            priority=checked.user_request.priority,
            cache_salt=checked.user_request.cache_salt,
            arrival_ns=checked.arrival_ns,
        )
        check_pooling(request, self.facts.model_info)
        return request

    def complete(
        self, checked: CheckedRequest, prepared: EngineCoreRequest
    ) -> list[EngineCoreRequest]:
        """Return the core's requests, one per completion.

        Raises RequestError if the user's id is in use.
        """
        self.outputs.check_unused(checked.user_request.request_id)
        return self.inputs.complete(prepared)

    def register(
        self, checked: CheckedRequest, requests: Sequence[EngineCoreRequest]
    ) -> CompletionGroup:
        """Register requests that the core has accepted. Call it before their outputs are read."""
        user_request = checked.user_request
        return self.outputs.add_request(
            user_request.request_id,
            requests,
            prompt=checked.read.text,
            kind=user_request.output_kind,
        )

    def _make_io_processor(self) -> IOProcessor | None:
        reference = self.facts.config.extensions.io_processor
        if reference is None:
            return None

        def context(own: Options) -> IOProcessorContext:
            return IOProcessorContext(
                model=self.facts.config.model,
                limits=self.facts.config.limits,
                tokenizer=self.tokenizer,
                default_sampling=self.inputs.default_params(),
                options=own,
            )

        instance: IOProcessor = make_instance(self._plugins, "io_processor", reference, context)
        return instance
