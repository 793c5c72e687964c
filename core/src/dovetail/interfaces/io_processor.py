"""The contract of an IO processor: it converts custom data to prompts, and outputs to results.

It runs in the front end, before and after the requests of a call of `LLM.process(data)`. It uses
prompts and outputs only, no tensors.
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
    """Constructor arguments of an IO processor.

    model: the model section of the configuration. limits: limits on the size of a request's values.
    tokenizer: None if the engine has none. default_sampling: parameters of requests that have none.
    options: the user's options from `plugin_options`.
    """

    model: ModelConfig
    limits: LimitsConfig
    tokenizer: Tokenizer | None
    default_sampling: SamplingParams
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class IORequest:
    """One call of `LLM.process`.

    data: the data in the format of the processor. sampling_params: parameters of prompts without
    their own parameters; None for the model's defaults.
    """

    data: Any
    sampling_params: SamplingParams | None = None


@dataclass(frozen=True, kw_only=True)
class IOPrompt:
    """One prompt from the data. sampling_params: None to use the parameters of the IORequest."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None
    priority: int = 0


@dataclass(frozen=True, kw_only=True)
class IOBatch:
    """The result of `pre_process`. state: any object. It is passed to `post_process` unchanged."""

    prompts: tuple[IOPrompt, ...]
    state: Any = None


@dataclass(frozen=True, kw_only=True)
class IOResult:
    """The input of `post_process`. outputs: one per prompt, in the order of the prompts.

    If a prompt was rejected or failed, its output has `error` set.
    """

    request: IORequest
    batch: IOBatch
    outputs: Sequence[RequestOutput]


class IOProcessor(ABC):
    """Converts data to prompts, and outputs to the caller's result.

    Contract: Calls may overlap, so an instance keeps no state of a call except in `IOBatch.state`.
    Invalid data raises RequestError with the position in the data. Data and outputs are not
    changed.
    example_data: valid data for `pre_process`, for documentation and test suites.
    """

    CONTRACT: ClassVar[str] = "io_processor"
    CONTRACT_VERSION: ClassVar[str] = "0.3"
    example_data: ClassVar[Any]

    @abstractmethod
    def __init__(self, context: IOProcessorContext) -> None:
        """Create the processor. Raise ConfigError for invalid options."""

    @abstractmethod
    def pre_process(self, request: IORequest) -> IOBatch:
        """Convert the data to zero or more prompts."""

    @abstractmethod
    def post_process(self, result: IOResult) -> Any:
        """Convert the outputs to the result of `LLM.process`."""
