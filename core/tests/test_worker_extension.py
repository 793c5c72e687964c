"""Worker extensions: added methods, rejected classes, and no effect on other workers."""

import abc

import pytest

from dovetail.config import EngineArgs
from dovetail.errors import ContractError, PluginNotFoundError
from dovetail.executors.uniproc import UniprocExecutor
from dovetail.interfaces import WorkerBase
from dovetail.plugins.extension import extend_worker
from dovetail_devkit.contexts import make_executor_context, make_worker_context, write_fake_config
from dovetail_devkit.fakes.executor import FakeExecutor
from dovetail_devkit.fakes.worker import FakeWorker
from dovetail_devkit.fakes.worker_extension import FakeWorkerExtension


class Counts:
    """A worker extension that returns the number of the worker's calls."""

    COUNTED = "calls"

    def count(self, start=0):
        self._count_of_counts = getattr(self, "_count_of_counts", 0) + 1
        return start + len(self.calls)

    @staticmethod
    def add(left, right):
        return left + right

    @property
    def counted(self):
        return self._count_of_counts


class Inherits(Counts):
    def count_twice(self):
        return 2 * self.count()


@pytest.fixture
def model(tmp_path):
    return write_fake_config(tmp_path)


@pytest.fixture(params=[False, True], ids=["depth1", "depth2"])
def start(request, model):
    created = []

    def build(extension):
        context = make_executor_context(
            model, FakeWorker, worker_extension_cls=extension, async_scheduling=request.param
        )
        created.append(UniprocExecutor(context))
        return created[-1]

    yield build
    for executor in created:
        executor.shutdown()


def test_methods_of_an_extension_are_operations_of_the_executor(start):
    executor = start(Inherits)
    # the calls are init_device and load_model
    assert executor.collective_rpc("count", args=(10,)) == [12]
    assert executor.collective_rpc("count_twice") == [4]
    assert executor.collective_rpc("add", kwargs={"left": 1, "right": 2}) == [3]
    assert executor.collective_rpc(lambda worker: worker.counted) == [2]
    assert executor.get_model_info().vocab_size == 97
    name = f"{FakeWorkerExtension.__module__}:FakeWorkerExtension"
    named = start(name).collective_rpc("fake_extension_host")
    assert named == ["FakeWorkerWithFakeWorkerExtension"]


def test_the_fake_executor_supports_extensions(model):
    context = make_executor_context(model, FakeWorker, worker_extension_cls=Counts)
    assert FakeExecutor(context).collective_rpc("count") == [2]


def test_the_class_of_the_worker_is_never_modified(start):
    before = dict(vars(FakeWorker))
    executor = start(Counts)
    assert executor.collective_rpc("count") == [2]
    assert dict(vars(FakeWorker)) == before
    plain = start("")
    with pytest.raises(ContractError, match="FakeWorker has no operation 'count'"):
        plain.collective_rpc("count")


def test_two_extended_classes_of_one_worker_are_independent(model):
    first, other = extend_worker(FakeWorker, Counts), extend_worker(FakeWorker, FakeWorkerExtension)
    assert not hasattr(first, "fake_extension_host") and not hasattr(other, "count")
    worker = first(make_worker_context(model))
    assert isinstance(worker, FakeWorker) and isinstance(worker, WorkerBase)
    assert worker.COUNTED == "calls"


def test_an_unknown_extension_is_rejected(start):
    with pytest.raises(PluginNotFoundError, match="nobody"):
        start("nobody")


def test_the_worker_extension_cls_option_sets_the_extension_and_defaults_to_none(model):
    config = EngineArgs(model, worker_extension_cls=Counts).create_engine_config()
    assert config.extensions.worker_extension_cls is Counts
    assert EngineArgs(model).create_engine_config().extensions.worker_extension_cls is None


class Abstract(abc.ABC):
    @abc.abstractmethod
    def to_be_written(self):
        """Return nothing. A subclass must define this abstract method."""


class Slotted:
    __slots__ = ("_kept",)

    def look(self):
        return self._kept


class WorkerWithoutBase:
    """A worker that does not inherit from WorkerBase and has a slot."""

    __slots__ = ("_place",)

    def init_device(self):
        return "mine"


def with_member(name, value):
    return type("Adds", (), {name: value})


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (
            with_member("load_model", lambda self: None),
            r"load_model is also a member of .*FakeWorker",
        ),
        (with_member("row_model_cls", None), r"row_model_cls is also a member of .*FakeWorker"),
        (with_member("_vocab_size", lambda self: 1), "_vocab_size is also a member of"),
        (with_member("sleep", lambda self: None), "sleep is also a member of .*worker:Sleeps"),
        (with_member("provides", frozenset()), "provides is also a member of"),
        (with_member("__init__", lambda self, context: None), "__init__ is a special method"),
        (with_member("__getattr__", lambda self, name: 1), "__getattr__ is a special method"),
        (type("Deep", (with_member("shutdown", 1),), {}), "shutdown is also a member of"),
    ],
)
def test_an_extension_that_defines_an_existing_attribute_is_rejected(start, extension, message):
    with pytest.raises(ContractError, match=message) as caught:
        start(extension)
    assert "cannot extend the worker dovetail_devkit.fakes.worker:FakeWorker" in str(caught.value)


def test_all_conflicting_names_of_an_extension_are_reported_together():
    both = type("Both", (), {"load_model": 1, "profile": 2, "fresh": 3})
    with pytest.raises(ContractError) as caught:
        extend_worker(FakeWorker, both)
    lines = str(caught.value).splitlines()
    assert [line.split()[1] for line in lines[1:-1]] == ["load_model", "profile"]


def test_names_of_the_worker_contract_are_always_reserved():
    with pytest.raises(ContractError, match=r"execute_model is also a member of .*WorkerBase"):
        extend_worker(WorkerWithoutBase, with_member("execute_model", lambda self: None))
    assert extend_worker(WorkerWithoutBase, Counts)().init_device() == "mine"


def test_an_extension_with_an_incompatible_class_layout_is_rejected():
    with pytest.raises(ContractError, match="plain class, without bases, slots or a metaclass"):
        extend_worker(WorkerWithoutBase, Slotted)


def test_an_abstract_extension_or_a_worker_is_rejected_as_extension(start):
    class Worker(WorkerBase):
        def look(self):
            return 1

    with pytest.raises(ContractError, match="CONTRACT = 'worker', but is used as a worker_ext"):
        start(Worker)
    with pytest.raises(ContractError, match="to_be_written is abstract"):
        start(Abstract)
    with pytest.raises(ContractError, match="to_be_written is abstract"):
        extend_worker(FakeWorker, Abstract)
