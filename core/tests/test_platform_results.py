"""Errors and invalid results of platform methods are reported with the platform's name."""

import logging

import pytest

from dovetail import LLM
from dovetail.config import EngineArgs
from dovetail.engine.choice import explain_choice
from dovetail.errors import ContractError, PluginError, PluginLoadError, PluginNotFoundError
from dovetail.interfaces import PlatformInfo
from dovetail.plugins import PluginRegistry
from dovetail.plugins.selection import Criteria, choose, choose_platform, explain
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.worker import FakeWorker

FAKE_WORKER = "dovetail_devkit.fakes.worker:FakeWorker"


def boom(*args, **kwargs):
    raise RuntimeError("boom")


def platform(**members):
    return type("Odd", (FakePlatform,), members)


@pytest.fixture
def start(tmp_path):
    """Start an engine on a platform and shut it down: `start(platform_cls, **options)`."""
    model = write_fake_config(tmp_path)

    def run(platform_cls, **options):
        plain = {"worker_cls": FAKE_WORKER, "scheduler_cls": "dovetail.scheduling:Scheduler"}
        options = {**SMALL_ENGINE, **plain, "skip_tokenizer_init": True, **options}
        LLM(model, platform=platform_cls, **options).shutdown()

    return run


def prefers(response, kind="worker"):
    return platform(prefer=lambda self, requested: response if requested == kind else ())


WRONG = {
    "prefer raises": (platform(prefer=boom), PluginLoadError, "preferred worker plugins.*boom"),
    **{
        f"prefer returns {response!r}": (prefers(response), ContractError, r"prefer\('worker'\)")
        for response in (None, "cpu", 5, {"cpu"}, (5,), [None], ("",), ("a b:c",))
    },
    "capabilities raises": (platform(capabilities=boom), PluginLoadError, "capabilities.*boom"),
    **{
        f"capabilities returns {response!r}": (
            platform(capabilities=lambda self, response=response: response),
            ContractError,
            r"capabilities\(\); it must return a frozenset",
        )
        for response in (None, "x", ["x"], {1})
    },
    "problems raises": (platform(problems=boom), PluginLoadError, "problems.*boom"),
    **{
        f"problems returns {response!r}": (
            platform(problems=lambda self, config, response=response: response),
            ContractError,
            r"problems\(config\)",
        )
        for response in (None, "no", [1], 3)
    },
    "defaults returns nothing": (
        platform(defaults=lambda self, config: None),
        ContractError,
        "it must return a ConfigPatch",
    ),
    "probe raises": (platform(probe=classmethod(boom)), PluginLoadError, "probe.*'fake'.*boom"),
    **{
        f"info is {info!r}": (platform(info=info), ContractError, "test_platform_results:Odd|Odd")
        for info in (None, "x", PlatformInfo(name="", device_type="cpu"))
    },
    "rank is text": (platform(rank="9"), ContractError, "rank = '9'"),
}


@pytest.mark.costly
@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_return_value_is_reported_as_an_error_of_the_platform(case, start):
    platform_cls, error, message = WRONG[case]
    with pytest.raises(error, match=f"(?s){message}") as rejection:
        start(platform_cls, worker_cls="auto")
    assert "StartError" not in type(rejection.value).__name__


def test_the_error_for_a_preferred_worker_that_is_not_installed_names_it(
    start, plugin_site, tmp_path
):
    missing = prefers(("npu", "npu2@acme"))
    message = (
        r"platform 'fake' prefers the worker 'npu', 'npu2@acme', which is not installed\. Inst"
    )
    with pytest.raises(PluginNotFoundError, match=message):
        start(missing, worker_cls="auto")
    start(missing)  # a worker that the user names needs no preference
    args = EngineArgs(write_fake_config(tmp_path), platform=missing, worker_cls="auto")
    explained = explain_choice("worker", args)
    assert not explained.chosen and "'npu', 'npu2@acme'" in explained.error


@pytest.mark.parametrize("kind", ["executor", "ops", "linear_method"])
@pytest.mark.parametrize(("names", "num_warnings"), [(("gone",), 1), (("gone", "kept"), 0)])
def test_a_warning_names_preferred_plugins_that_are_not_installed(
    kind, names, num_warnings, caplog
):
    registry = PluginRegistry()
    kept = registry.candidates(kind)[0].name
    names = tuple(kept if name == "kept" else name for name in names)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choose(registry, prefers(names, kind)(), kind, "auto")
    message = [record.getMessage() for record in caplog.records]
    assert len(message) == num_warnings
    assert all(f"prefers the {kind} 'gone', which is not installed" in item for item in message)


ODD = """
from dovetail.interfaces import PlatformInfo
from dovetail_devkit.fakes.platform import FakePlatform

class Sound(FakePlatform):
    automatic = True

class Odd(Sound):
    info = {"name": "odd"}
    rank = 9
"""


def test_automatic_selection_skips_a_platform_with_an_invalid_info(plugin_site, caplog):
    targets = {"odd": ":Odd", "sound": ":Sound"}
    plugin_site.add("dovetail-a", {"platform": targets}, init=ODD)
    registry = plugin_site.registry()
    assert type(choose_platform(registry, "auto")).__name__ == "Sound"
    (message,) = registry.set_aside
    assert "it must be a PlatformInfo" in message and message in caplog.text
    explained = explain(plugin_site.registry(), "platform", Criteria(references=("auto",)))
    assert [item.name for item in explained.chosen] == ["sound"]


class OtherWorker(FakeWorker):
    device_types = frozenset({"npu"})


def test_a_worker_for_another_device_is_rejected_before_construction(start):
    message = (
        r"worker 'OtherWorker' was requested on the platform 'fake', but it cannot be used here: "
        "it supports npu, but the platform's device is cpu"
    )
    with pytest.raises(PluginError, match=message):
        start(FakePlatform, worker_cls=OtherWorker)
    start(platform(info=PlatformInfo(name="n", device_type="npu")), worker_cls=OtherWorker)
