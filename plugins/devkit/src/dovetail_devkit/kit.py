"""Lists all conformance cases of a plugin, with the arguments that they need.

The cases of every plugin (`plugin_cases`) come first, then those of the suite of its kind
(`suite_cases`). A test runner shows each case as a separate test. This module depends on the
suites, but not on plugins or test runners.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail_devkit import load_suite
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking
from dovetail_devkit.kit_subjects import Subjects

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.scheduler import SchedulerInterface

CaseMaker = Callable[[type[Any], Subjects], Iterable[Case]]
DeviceCases = Callable[["torch.device"], Iterable[Case]]

_TORCH_KINDS = frozenset(
    {
        "attention",
        "compile_backend",
        "graph_pass",
        "kv_connector",
        "linear_method",
        "logits_processor",
        "model",
        "ops",
        "step_extension",
        "weight_loader",
        "worker",
    }
)


def suite_cases(kind: str, cls: type[Any], subjects: Subjects) -> Iterator[Case]:
    """Yield the cases of the suite of `kind` for a loaded class, without running them."""
    make = _MAKERS.get(kind, partial(_whole_suite, kind))
    try:
        cases = list(make(cls, subjects))
    except Exception as error:
        # A plugin that fails while cases are listed must be a failed case, not an aborted run.
        cases = [Case(name="the suite", run=partial(_raise, error))]
    for case in cases:
        yield Case(name=case.name, run=partial(_run, case, kind, subjects.unusable))


def _raise(error: Exception) -> None:
    raise error


def _run(case: Case, kind: str, unusable: str) -> None:
    if unusable:
        raise SkipCase(unusable)
    with checking(f"{kind}, {case.name!r}"):
        if kind in _TORCH_KINDS:
            _run_in_one_thread(case)
        else:
            case.run()


def _run_in_one_thread(case: Case) -> None:
    """Run a case. Limit torch, if it is installed, to one thread, because tensors are small."""
    try:
        import torch
    except ImportError:
        case.run()
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        case.run()
    finally:
        torch.set_num_threads(before)


def _whole_suite(kind: str, cls: type[Any], subjects: Subjects) -> Iterator[Case]:
    """Yield one case that runs the whole suite, for suites without a list of cases."""
    yield Case(name="the suite", run=partial(_run_whole, kind, cls, subjects))


def _run_whole(kind: str, cls: type[Any], subjects: Subjects) -> None:
    suite = load_suite(kind)
    parameters = inspect.signature(suite).parameters
    arguments = (subjects.find_device(frozenset()),) if "device" in parameters else ()
    options = subjects.registry.options_of(kind, cls)
    kwargs = {"options": options} if options and "options" in parameters else {}
    suite(cls, *arguments, **kwargs)


def _on_device(claimed: frozenset[str], subjects: Subjects, make: DeviceCases) -> Iterator[Case]:
    """Yield cases on a claimed device. Skip them if the machine has none."""
    import torch

    try:
        device = subjects.find_device(claimed)
    except SkipCase as reason:
        for case in make(torch.device("cpu")):
            yield Case(name=case.name, run=partial(_leave_out, str(reason)))
        return
    yield from make(device)


def _leave_out(reason: str) -> None:
    raise SkipCase(reason)


def _attention(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.attention import attention_cases

    types = cls.capabilities.device_types
    return _on_device(types, subjects, partial(attention_cases, cls))


def _kv_connector(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.kv_connector import kv_connector_cases

    options = subjects.registry.options_of("kv_connector", cls)
    return _on_device(
        frozenset(), subjects, partial(kv_connector_cases, cls, options=options or None)
    )


def _linear_method(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.linear_method import linear_method_cases

    return _on_device(cls.device_types, subjects, partial(linear_method_cases, cls))


def _ops(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.ops import ops_cases

    return _on_device(cls.device_types, subjects, partial(ops_cases, cls))


def _model(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail.interfaces.weight_loader import WeightLoaderContext
    from dovetail_devkit.fakes.weight_loader import FakeWeightLoader
    from dovetail_devkit.suites.model import model_cases

    loader = FakeWeightLoader(WeightLoaderContext(model_dir=subjects.folder, progress=False))

    def fill(model: Any) -> None:
        loader.load(model)

    def make(device: torch.device) -> Iterable[Case]:
        config = subjects.model_config(cls)
        return model_cases(cls, subjects.model_context(config, device), fill=fill)

    return _on_device(frozenset(), subjects, make)


def _weight_loader(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.weight_loader import weight_loader_cases

    subjects.check_format(cls)
    checkpoint, model_cls = subjects.checkpoint()

    def make(device: torch.device) -> Iterable[Case]:
        make_model = partial(model_cls, subjects.model_context(checkpoint.config, device))
        return weight_loader_cases(cls, checkpoint.path, make_model)

    return _on_device(frozenset(), subjects, make)


def _worker(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.worker import WorkerBench, worker_cases

    bench = WorkerBench(cls, lambda: subjects.worker_context(cls))
    subjects.stack.callback(bench.close)
    return worker_cases(bench)


def _executor(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.executor import executor_cases

    return executor_cases(cls)


def _platform(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.platform import platform_cases

    return platform_cases(cls)


def _policy(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.policy import policy_cases

    return policy_cases(cls)


def _scheduler(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail.scheduling import Scheduler
    from dovetail_devkit.suites.scheduler import look_away, scheduler_cases, takes_a_cache

    def check_more(scheduler: SchedulerInterface) -> None:
        if isinstance(scheduler, Scheduler):
            scheduler.check_integrity()

    is_scheduler = issubclass(cls, Scheduler)
    return scheduler_cases(
        cls,
        keeps_cache=takes_a_cache(cls),
        keeps_prefixes=is_scheduler,
        after_step=check_more if is_scheduler else look_away,
    )


def _tokenizer(cls: type[Any], subjects: Subjects) -> Iterable[Case]:
    from dovetail_devkit.suites.tokenizer import tokenizer_cases

    subjects.check_format(cls)
    model_dir, lossless = subjects.tokenizer_dir()
    return tokenizer_cases(cls, model_dir, lossless=lossless)


_MAKERS: Mapping[str, CaseMaker] = {
    "attention": _attention,
    "executor": _executor,
    "kv_connector": _kv_connector,
    "linear_method": _linear_method,
    "model": _model,
    "ops": _ops,
    "platform": _platform,
    "policy": _policy,
    "scheduler": _scheduler,
    "tokenizer": _tokenizer,
    "weight_loader": _weight_loader,
    "worker": _worker,
}
