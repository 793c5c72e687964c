"""Valid and invalid options of the CPU worker and of its subclasses."""

from typing import ClassVar

import pytest
from pydantic import BaseModel, Field

from dovetail import LLM
from dovetail.errors import ConfigError
from dovetail_cpu.options import CPUWorkerOptions
from dovetail_cpu.worker import CPUWorker
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.tiny_model import write_tiny_llama

pytest.importorskip("dovetail_models")


class Plain(CPUWorker):
    """A worker with the options of the CPU worker."""


class MoreOptions(CPUWorkerOptions):
    """The options of the CPU worker and one additional option."""

    color: str = "red"


class WorkerWithMoreOptions(CPUWorker):
    """A worker with one additional option."""

    options_model: ClassVar[type[BaseModel]] = MoreOptions


class OwnOptions(BaseModel, extra="forbid"):
    """Options that do not extend those of the CPU worker."""

    speed: int = Field(default=1, ge=1)


class Own(CPUWorker):
    """A worker whose options do not extend those of the CPU worker."""

    options_model: ClassVar[type[BaseModel]] = OwnOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def start(model, worker_cls, options):
    key = worker_cls if isinstance(worker_cls, str) else worker_cls.__qualname__
    LLM(
        model,
        worker_cls=worker_cls,
        plugin_options={f"worker:{key}": options},
        skip_tokenizer_init=True,
        **SMALL_ENGINE,
    ).shutdown()


@pytest.mark.costly
@pytest.mark.parametrize("worker_cls", ["cpu", Plain, WorkerWithMoreOptions])
@pytest.mark.parametrize(
    ("options", "report"),
    [
        ({"packed_cache_gib": "many"}, "packed_cache_gib"),
        ({"packed_cache_gib": -1}, "packed_cache_gib"),
        ({"packed_cach": "off"}, "packed_cache"),
        ({"packed_cache_min_mib": [1]}, "packed_cache_min_mib"),
    ],
)
def test_the_error_for_an_invalid_option_names_worker_and_option(
    model, worker_cls, options, report
):
    with pytest.raises(ConfigError, match=report) as caught:
        start(model, worker_cls, options)
    assert "plugin_options" in str(caught.value) and "worker" in str(caught.value)
    assert "executor" not in str(caught.value)


@pytest.mark.parametrize(
    ("worker_cls", "options"),
    [
        (Plain, {"packed_cache": "off"}),
        (WorkerWithMoreOptions, {"color": "blue"}),
        (Own, {"speed": 3}),
    ],
)
def test_subclasses_accept_their_own_options(model, worker_cls, options):
    start(model, worker_cls, options)
