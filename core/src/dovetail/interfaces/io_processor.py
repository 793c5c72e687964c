"""The contract of an IO processor: data of its own form to prompts, outputs to results.

It runs in the front end, around a list of requests: `LLM.process(data)`. It knows prompts and
outputs, and neither tensors nor scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.inputs import Prompt
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.outputs import RequestOutput
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import ModelConfig
    from dovetail.interfaces.requested_config import LimitsConfig


@dataclass(frozen=True, kw_only=True)
class IOProcessorContext:
    """All that an IO processor is made from.

    model: the model's section of the configuration. limits: of the values of a request.
    tokenizer: None where the engine has none. default_sampling: what a request gets that brings no
    parameters. options: the user's, from `plugin_options`.
    """

    model: ModelConfig
    limits: LimitsConfig
    tokenizer: Tokenizer | None
    default_sampling: SamplingParams
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IORequest:
    """One call of `LLM.process`.

    data: whatever the processor documents. sampling_params: the caller's, for every prompt that
    brings none of its own; None for the model's defaults.
    """

    data: Any
    sampling_params: SamplingParams | None = None


@dataclass(frozen=True, kw_only=True)
class IOPrompt:
    """One prompt that came of the data. sampling_params: None for those of the IORequest."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class IOBatch:
    """What `pre_process` made. state: the processor's own; handed back to it untouched."""

    prompts: tuple[IOPrompt, ...]
    state: Any = None


@dataclass(frozen=True, kw_only=True)
class IOResult:
    """What the engine answered: one output a prompt, in the order of the prompts.

    An output whose `error` is set belongs to a prompt that was refused, or that failed.
    """

    request: IORequest
    batch: IOBatch
    outputs: Sequence[RequestOutput]


class IOProcessor(ABC):
    """Turns data into prompts, and the outputs into what the caller gets.

    Contract. An instance keeps nothing of one call for the next: what belongs to a call is in
    `IOBatch.state`, so that calls may overlap. Data that is wrong raises RequestError, saying where
    in the data. Neither data nor outputs are changed.
    example_data: data that `pre_process` takes, for documentation and suites.
    """

    CONTRACT: ClassVar[str] = "io_processor"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    example_data: ClassVar[Any]

    @abstractmethod
    def __init__(self, context: IOProcessorContext) -> None:
        """Keep what is needed of `context`; raise ConfigError for options that are wrong."""

    @abstractmethod
    def pre_process(self, request: IORequest) -> IOBatch:
        """Return the prompts of the data, any number of them."""

    @abstractmethod
    def post_process(self, result: IOResult) -> Any:
        """Return what the caller of `LLM.process` gets."""
