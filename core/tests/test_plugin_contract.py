"""Contract checks: accepted and rejected classes, and all problems in one report."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.errors import ContractError
from dovetail.interfaces import Executor, Policy, SchedulerInterface, WeightLoader
from dovetail.plugins import KINDS, check_contract
from dovetail.plugins.capabilities import check_claims
from dovetail.plugins.contracts.checks import contract_version


def problems(kind: str, cls: object) -> list[str]:
    with pytest.raises(ContractError) as caught:
        check_contract(kind, cls)
    head, *listed = str(caught.value).split("\n  - ")
    assert f"{len(listed)} problem" in head
    return listed


class Loader:
    """A weight loader without a base class."""

    CONTRACT_VERSION = WeightLoader.CONTRACT_VERSION

    def __init__(self, context: Any) -> None: ...

    def load(self, model: Any) -> int:
        return 0


class LlamaLike:
    CONTRACT_VERSION = contract_version("model")
    architectures = ("LlamaForCausalLM",)

    def __init__(self, context: Any) -> None: ...

    def forward(self, ids_T: Any, positions_T: Any, attention: Any) -> Any: ...

    def compute_logits(self, hidden: Any) -> Any: ...


def test_every_kind_has_an_interface() -> None:
    for name, kind in KINDS.items():
        module, _, attribute = kind.contract.partition(":")
        interface = getattr(importlib.import_module(module), attribute)
        assert name == interface.CONTRACT
        assert kind.group == f"dovetail.{name}"


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"ops", "policy", "worker_extension"}))
def test_an_abstract_interface_does_not_meet_its_contract(kind: str) -> None:
    module, _, attribute = KINDS[kind].contract.partition(":")
    interface = getattr(importlib.import_module(module), attribute)
    assert any("is missing" in problem for problem in problems(kind, interface))


def test_duck_typed_classes_and_subclasses_are_accepted() -> None:
    assert check_contract("weight_loader", Loader) == ()
    assert check_contract("model", LlamaLike) == ()
    assert check_contract("policy", Policy) == ()

    class Sub(WeightLoader):
        def __init__(self, context: Any) -> None: ...

        def load(self, model: Any) -> int:
            return 0

    assert check_contract("weight_loader", Sub) == ()


def test_a_missing_contract_version_is_reported() -> None:
    class Silent(Loader):
        CONTRACT_VERSION = None

    version = WeightLoader.CONTRACT_VERSION
    assert (
        f"declares no CONTRACT_VERSION; the core assumes {version}"
        in check_contract("weight_loader", Silent)[0]
    )


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.99", "newer"), ("1.0", "newer"), ("0.0", "older"), (0.1, "write a str")],
)
def test_plugins_of_other_contract_versions_are_rejected(version: object, message: str) -> None:
    created = type("Made", (Loader,), {"CONTRACT_VERSION": version})
    (problem,) = problems("weight_loader", created)
    assert message in problem


def test_a_class_of_another_kind_is_rejected() -> None:
    class Wrong(Policy):
        pass

    reported = problems("scheduler", Wrong)
    assert reported[0] == "it declares CONTRACT = 'policy', but is used as a scheduler"


def test_all_contract_problems_are_reported_together() -> None:
    class Bad(SchedulerInterface):
        CONTRACT_VERSION = "7.0"

        def __init__(self) -> None: ...

        def add_request(self, request: Any, urgency: int) -> None: ...

        async def schedule(self) -> Any: ...

        def abort_requests(self) -> Any: ...

        def depth(self, extra: int = 0) -> Any: ...

        shutdown = 3

    reported = problems("scheduler", Bad)
    assert len(reported) == 10
    listed = "\n".join(reported)
    assert "contract version 7.0" in listed
    assert "__init__: the method does not take 'context'" in listed
    assert "add_request: the method requires 'urgency', which no caller passes" in listed
    assert "schedule: the method is async" in listed
    assert "abort_requests: the method does not take 'request_ids'" in listed
    assert "method update_from_output(self, plan, output) is missing" in listed
    assert "method reset_prefix_cache(self) is missing" in listed
    assert "shutdown: the class has an int" in listed


def test_a_duck_typed_class_must_define_the_attributes_that_a_subclass_inherits() -> None:
    class Shortest:
        def rank(self, request: Any, view: Any) -> Any: ...

    reported = problems("policy", Shortest)
    assert "method victim(self, running, view) is missing" in reported
    assert "attribute static_rank is missing" in reported
    assert not [problem for problem in reported if "rank(" in problem]


def test_a_class_without_init_does_not_accept_the_context() -> None:
    class ConstructorWithoutContext:
        def load(self, model: Any) -> int: ...

    assert problems("weight_loader", ConstructorWithoutContext) == [
        "__init__: the method does not take 'context'"
    ]


def test_a_method_inherited_from_a_protocol_does_not_implement_the_contract() -> None:
    from dovetail.interfaces import Model

    class ModelWithoutLogits(Model):
        architectures: ClassVar[tuple[str, ...]] = ("ModelWithoutLogits",)

        def __init__(self, context: Any) -> None: ...

        def forward(self, input_ids_T: Any, positions_T: Any, attention: Any) -> Any: ...

    assert problems("model", ModelWithoutLogits) == [
        "method compute_logits(self, hidden_SD) is missing"
    ]


def test_abstract_methods_are_reported() -> None:
    import abc

    class Open(Loader, abc.ABC):
        @abc.abstractmethod
        def more(self) -> None: ...

    assert problems("weight_loader", Open) == [
        "more is abstract, so the class cannot be instantiated"
    ]


def executor(**changes: Any) -> type:
    """Return a correct executor class with `changes` applied."""

    def collective_rpc(self: Any, operation: Any, **more: Any) -> Any: ...

    members: dict[str, Any] = {
        "__init__": lambda self, context: None,
        "collective_rpc": collective_rpc,
        "execute_model": lambda self, plan: None,
        "sample_tokens": lambda self, grammar=None: None,
        "check_health": lambda self: None,
        "shutdown": lambda self: None,
    }
    return type("Made", (Executor,), members | changes)


def logged(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"execute_model": lambda self, p: None},
        {"execute_model": lambda self, plan, extra=1: None},
        {"execute_model": lambda *args: None},
        {"execute_model": logged(lambda self, plan: None)},
        {"execute_model": staticmethod(lambda plan: None)},
        {"execute_model": classmethod(lambda cls, plan: None)},
        {"execute_model": functools.partialmethod(lambda self, a, plan: None, 1)},
        {"sample_tokens": lambda self, g=None, **more: None},
        {"collective_rpc": lambda self, operation, **more: None},
        {"collective_rpc": lambda self, operation, args=(), kwargs=None, **more: None},
    ],
)
def test_a_signature_is_valid_if_it_accepts_every_call_of_the_contract(
    changes: dict[str, Any],
) -> None:
    assert check_contract("executor", executor(**changes)) == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"execute_model": lambda self: None}, "does not take 'plan'"),
        ({"execute_model": lambda: None}, "has no parameter 'self'"),
        ({"execute_model": lambda self, plan, x: None}, "requires 'x', which no caller passes"),
        ({"execute_model": lambda self, plan, *, x: None}, "requires 'x', which no caller passes"),
        ({"execute_model": property(lambda self: None)}, "has a property"),
        ({"execute_model": logged(lambda self: None)}, "does not take 'plan'"),
        ({"sample_tokens": lambda self, grammar: None}, "'grammar', which callers may omit"),
        (
            {"sample_tokens": lambda self, g=None: None},
            "the parameter 'g' must be called 'gra",
        ),
        ({"collective_rpc": lambda self, operation: None}, "does not take the keyword 'args'"),
        (
            {"collective_rpc": lambda self, operation, *, args, **more: None},
            "requires 'args', which callers may omit",
        ),
    ],
)
def test_a_signature_is_invalid_if_it_rejects_a_call_of_the_contract(
    changes: dict[str, Any], message: str
) -> None:
    reported = problems("executor", executor(**changes))
    assert message in reported[0]


class Words:
    """A tokenizer without a base class."""

    CONTRACT_VERSION = contract_version("tokenizer")
    eos_token_id = None
    special_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]

    @classmethod
    def from_directory(cls, path: Any) -> Any: ...

    @property
    def vocab_size(self) -> int:
        return 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any: ...

    def encode_pair(self, first: str, second: str) -> Any: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any: ...

    def token_pieces(self, *, skip_special_tokens: bool) -> Any: ...

    def apply_chat_template(self, messages: Any, **variables: Any) -> Any: ...


def test_properties_can_be_attributes_but_not_methods() -> None:
    class Wrong(Words):
        def from_directory(self, path: Any) -> Any: ...

        def vocab_size(self) -> int: ...

        def apply_chat_template(self, messages: Any, *, chat_template: Any = None) -> Any: ...

    assert check_contract("tokenizer", Words) == ()
    assert problems("tokenizer", Wrong) == [
        "from_directory: the method must be a classmethod: it is called on the class",
        "vocab_size: the class has a method, but the contract has a property",
        "apply_chat_template: the method does not take the keyword 'add_generation_prompt'",
        "apply_chat_template: the method does not accept **kwargs, but the contract does",
    ]


def test_the_contract_of_a_capability_does_not_specify_the_constructor() -> None:
    """`typing` adds a constructor to a Protocol. This constructor is not part of the contract."""

    class SleepModeWorker:
        def __init__(self, context: Any) -> None: ...

        def sleep(self, level: int) -> None: ...

        def wake_up(self, tags: tuple[str, ...] = ()) -> None: ...

    check_claims("worker", SleepModeWorker, frozenset({"sleep"}))
