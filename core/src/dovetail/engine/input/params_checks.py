"""Checks of a request's parameters by logits processors and step extensions.

A worker cannot reject a request, because it gets the request in a batch with other requests.
Therefore the engine runs each plugin's `check_params`. A check that raises an unexpected error
rejects only the request that it checks. This module does not construct the plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.config import EngineConfig
from dovetail.engine.input.pooling_checks import check_pooling
from dovetail.errors import ConfigError, ContractError, RequestError
from dovetail.interfaces import LogitsProcessor, ModelInfo, StepExtension
from dovetail.interfaces.requested_config import LimitsConfig
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams

_OPTIONS = {"logits_processor": "logits_processors", "step_extension": "step_extensions"}
"""The option that names plugins of each kind. A worker that runs these plugins has the name of
the option in its `provides`."""

ParamsCheck = Callable[[SamplingParams], None]


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """The rules by which an engine accepts or rejects requests.

    params_checks: the plugins' checks of sampling parameters. limits: maximum sizes of values.
    worker_provides: the worker's capability ids; a request that needs another one is rejected.
    sleep_enabled: whether the engine was created with `enable_sleep_mode`. model_info: the tasks
    and sizes of the loaded model.
    """

    params_checks: tuple[ParamsCheck, ...] = ()
    worker_provides: frozenset[str] = frozenset()
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    sleep_enabled: bool = False
    model_info: ModelInfo = field(default_factory=lambda: ModelInfo(vocab_size=0))

    def check(self, request: EngineCoreRequest) -> None:
        """Raise RequestError if the model or a plugin does not support the request."""
        check_pooling(request, self.model_info)
        for check in self.params_checks:
            check(request.sampling_params)


def load_rules(config: EngineConfig, plugins: PluginRegistry, worker_cls: type) -> RequestRules:
    """Return the rules of an engine. Raises the errors of `load_params_checks`."""
    return RequestRules(
        params_checks=load_params_checks(config, plugins, worker_cls),
        worker_provides=declared_ids(worker_cls, "provides"),
        limits=config.limits,
        sleep_enabled=config.cache.enable_sleep_mode,
    )


def load_params_checks(
    config: EngineConfig, plugins: PluginRegistry, worker_cls: type
) -> tuple[ParamsCheck, ...]:
    """Return the checks of the plugins that the user named, in their order.

    Raises PluginError for a plugin that cannot be loaded, ConfigError for a plugin that is named
    twice, and ContractError if the worker would not run them.
    """
    references = {
        "logits_processor": config.extensions.logits_processors,
        "step_extension": config.extensions.step_extensions,
    }
    return tuple(
        check
        for kind, own in references.items()
        if own
        for check in _checks_of(kind, own, plugins, worker_cls)
    )


def _checks_of(
    kind: str, references: Sequence[str | type], plugins: PluginRegistry, worker_cls: type
) -> Iterable[ParamsCheck]:
    option = _OPTIONS[kind]
    if option not in getattr(worker_cls, "provides", ()):
        raise ContractError(
            f"{option} is set, but the worker {worker_cls.__qualname__} would ignore it, because "
            f"its `provides` does not contain {option!r}. Choose another worker_cls, or omit "
            f"{option}."
        )
    checks: dict[str, ParamsCheck] = {}
    for reference in references:
        plugin = plugins.resolve(kind, reference)
        name = plugin.name
        if plugin.target in checks:
            raise ConfigError(f"{option} contains {name!r} twice; list it once.")
        checks[plugin.target] = _guarded(
            f"{kind.replace('_', ' ')} {name!r}", plugins.load(kind, reference)
        )
    return checks.values()


def _guarded(name: str, plugin_cls: type[LogitsProcessor] | type[StepExtension]) -> ParamsCheck:
    def check(params: SamplingParams) -> None:
        try:
            plugin_cls.check_params(params)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the {name} failed to check extra_args: {type(error).__name__}: "
                f"{error}. Correct its arguments in extra_args, or omit them.",
                parameter="extra_args",
            ) from error

    return check
