"""What stands before and behind an engine core: tokenizer, input and output processor, listeners.

In two parts, since a wrong pick is told before the core is started, and sizes are known after.
`LLMEngine` and `AsyncLLM` share it. Knows neither how the core runs nor who drives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.config.model_directory import default_sampling_params, eos_token_ids
from dovetail.engine.input_processor import InputFacts, InputProcessor
from dovetail.engine.listeners import Listeners
from dovetail.engine.output_processor import OutputProcessor
from dovetail.engine.plugin_picks import check_picks, make_registry
from dovetail.engine.prompt_reading import prompt_text
from dovetail.errors import RequestError, UserError
from dovetail.hooks import HookPlugins, load_hooks
from dovetail.interfaces import IOProcessor, IOProcessorContext, Tokenizer
from dovetail.outputs import RequestOutputKind
from dovetail.plugins import PluginRegistry
from dovetail.plugins.instance import Options, make_instance

if TYPE_CHECKING:
    from dovetail.clock import Clock
    from dovetail.config import EngineConfig
    from dovetail.engine.output_processor import CompletionGroup
    from dovetail.engine.process.client import EngineFacts
    from dovetail.inputs import Prompt
    from dovetail.request import EngineCoreRequest
    from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class AskedRequest:
    """What a user asks for: the arguments of `LLMEngine.add_request`, as one."""

    request_id: str
    prompt: Prompt
    params: SamplingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What a front end has before its core is started. tokenizer: None if there is to be none."""

    plugins: PluginRegistry
    hooks: HookPlugins
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, config: EngineConfig) -> Preparation:
        """Check the picks and load hooks and tokenizer; raise a DovetailError for what is unfit."""
        plugins = make_registry(config)
        # Before the tokenizer: a wrong name is told at once, whatever the size of its files.
        check_picks(config, plugins)
        hooks = load_hooks(config.extensions.hooks, plugins)
        return cls(plugins=plugins, hooks=hooks, tokenizer=_load_tokenizer(config, plugins))


class FrontEnd:
    """The parts around a core that has started. Not thread-safe; stop the listeners at the end."""

    def __init__(self, prepared: Preparation, facts: EngineFacts, clock: Clock) -> None:
        """Make them; raise a DovetailError for what is unfit. The core stays the caller's."""
        self.facts = facts
        self.tokenizer = prepared.tokenizer
        self._plugins = prepared.plugins
        model = facts.config.model
        known = eos_token_ids(model.hf_config, model.generation_config)
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        self.inputs = InputProcessor(
            InputFacts(
                vocab_size=facts.model_info.vocab_size,
                max_model_len=facts.max_model_len,
                eos_token_ids=known if own is None else known | {own},
                max_logprobs=model.max_logprobs,
                default_sampling=default_sampling_params(model.generation_config),
                seed=model.seed,
            ),
            tokenizer=self.tokenizer,
            clock=clock,
        )
        self.outputs = OutputProcessor(self.tokenizer, clock=clock)
        self.io_processor = self._make_io_processor()
        self.listeners = Listeners(facts.config, prepared.plugins, prepared.hooks, clock)

    def check_can_generate(self) -> None:
        """Raise UserError, with what the model can be asked for, if that is not to generate."""
        tasks = self.facts.model_info.supported_tasks
        if "generate" not in tasks:
            raise UserError(
                f"{self.facts.config.model.architecture} cannot generate; it supports: "
                f"{', '.join(tasks)}."
            )

    def expect(
        self, asked: AskedRequest, core_id: str = ""
    ) -> tuple[list[EngineCoreRequest], CompletionGroup]:
        """Make the core's requests of a user's and expect their outputs; return both.

        core_id: what the core is to call it; "" for the user's own id. Raises RequestError, naming
        the parameter; nothing is expected then.
        """
        self.check_can_generate()
        if not isinstance(asked.output_kind, RequestOutputKind):
            raise RequestError(
                f"output_kind={asked.output_kind!r} is no RequestOutputKind; it can be "
                f"{', '.join(f'RequestOutputKind.{kind.name}' for kind in RequestOutputKind)}.",
                parameter="output_kind",
            )
        requests = self.inputs.process(
            core_id or asked.request_id,
            asked.prompt,
            asked.params,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
        )
        group = self.outputs.add_request(
            asked.request_id, requests, prompt=prompt_text(asked.prompt), kind=asked.output_kind
        )
        return requests, group

    def _make_io_processor(self) -> IOProcessor | None:
        reference = self.facts.config.extensions.io_processor
        if reference is None:
            return None

        def context(own: Options) -> IOProcessorContext:
            return IOProcessorContext(
                config=self.facts.config,
                tokenizer=self.tokenizer,
                default_sampling=self.inputs.default_params(),
                options=own,
            )

        made: IOProcessor = make_instance(self._plugins, "io_processor", reference, context)
        return made


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
