"""What logits processors say of a request's parameters, before the engine takes it in.

A worker cannot refuse a request: by then it runs with others. So each processor's own check runs
in the engine, and a check that fails itself refuses its one request. Makes no processor.
"""

from __future__ import annotations

from collections.abc import Callable

from dovetail.config import EngineConfig
from dovetail.errors import ConfigError, ContractError, RequestError
from dovetail.interfaces import LogitsProcessor
from dovetail.plugins import PluginRegistry
from dovetail.plugins.instance import plugin_name
from dovetail.sampling_params import SamplingParams

CAPABILITY = "logits_processors"
"""What a worker declares in `provides` if it runs them."""

ParamsCheck = Callable[[SamplingParams], None]


def load_params_checks(
    config: EngineConfig, plugins: PluginRegistry, worker_cls: type
) -> tuple[ParamsCheck, ...]:
    """Return the checks of the logits processors that the user named, in their order.

    Raises PluginError for one that cannot be loaded, ConfigError for one that is named twice, and
    ContractError if the worker would not run them.
    """
    references = config.extensions.logits_processors
    if references and CAPABILITY not in getattr(worker_cls, "provides", ()):
        raise ContractError(
            f"logits_processors names {len(references)}, but the worker {worker_cls.__qualname__} "
            f"does not declare {CAPABILITY!r} in `provides`: it would not run them. Choose another "
            "worker_cls, or leave them out."
        )
    checks: dict[str, ParamsCheck] = {}
    for reference in references:
        name = plugin_name(plugins, "logits_processor", reference)
        if name in checks:
            raise ConfigError(f"logits_processors names {name!r} twice; name it once.")
        checks[name] = _guarded(name, plugins.load("logits_processor", reference))
    return tuple(checks.values())


def _guarded(name: str, processor_cls: type[LogitsProcessor]) -> ParamsCheck:
    def check(params: SamplingParams) -> None:
        try:
            processor_cls.check_params(params)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"the logits processor {name!r} cannot judge extra_args: {type(error).__name__}: "
                f"{error}. Leave its arguments out, or correct them.",
                parameter="extra_args",
            ) from error

    return check
