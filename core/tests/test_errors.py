import inspect
import time

import pytest

from dovetail import errors
from dovetail.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    DovetailError,
    EngineDeadError,
    ModelError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    RequestError,
    UserError,
    WeightError,
    nearest,
)

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", ALL)
def test_the_base_class_catches_all_errors(cls):
    assert issubclass(cls, DovetailError)
    assert not issubclass(DovetailError, (ValueError, TypeError))


@pytest.mark.parametrize(
    ("cls", "parents"),
    [
        (ConfigError, (UserError, ValueError)),
        (RequestError, (UserError, ValueError)),
        (WeightError, (ModelError, UserError)),
        (PluginNotFoundError, (PluginError, LookupError)),
        (PluginLoadError, (PluginError, ImportError)),
        (ContractError, (PluginError, TypeError)),
    ],
)
def test_errors_have_the_documented_base_classes(cls, parents):
    assert all(issubclass(cls, parent) for parent in parents)
    assert str(cls("said")) == "said"


def test_plugin_errors_are_not_user_errors():
    assert not issubclass(PluginError, UserError)
    assert not issubclass(CapacityError, UserError)


@pytest.mark.parametrize(
    ("message", "parameter", "expected", "name"),
    [
        ("prompt is empty.", "prompt", "documents[1] is empty.", "documents[1]"),
        ("the prompt is empty.", "prompt", "documents[1]: the prompt is empty.", "documents[1]"),
        ("priority is 1.5.", "priority", "priority is 1.5.", "priority"),
    ],
)
def test_an_error_of_a_prompt_gets_the_name_of_the_text(message, parameter, expected, name):
    error = RequestError(message, parameter=parameter).with_name("documents[1]")
    assert (str(error), error.parameter) == (expected, name)


def test_an_error_of_another_parameter_gets_the_name_of_the_argument():
    error = RequestError("params must be SamplingParams.", parameter="params")
    renamed = error.with_name("sampling_params", replaced="params")
    assert str(renamed) == "sampling_params must be SamplingParams."
    assert renamed.parameter == "sampling_params"
    assert error.with_name("documents[1]") is error


def test_the_class_tree_in_the_docstring_names_every_error():
    missing = [cls.__name__ for cls in ALL if cls.__name__ not in errors.__doc__]
    assert not missing


def test_a_request_error_names_its_parameter():
    assert RequestError("no", parameter="top_p").parameter == "top_p"
    assert RequestError("no").parameter == ""


def test_an_engine_dead_error_reports_the_running_requests():
    error = EngineDeadError("worker 0 died", digest="step 3: 2 scheduled requests")
    assert str(error) == "worker 0 died\nstep 3: 2 scheduled requests"
    assert error.digest == "step 3: 2 scheduled requests"
    assert str(EngineDeadError("worker 0 died")) == "worker 0 died"


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("fcsf", ["fcfs", "priority"], " Did you mean 'fcfs'?"),
        ("zzzz", ["fcfs", "priority"], ""),
        ("fcfs", [], ""),
    ],
)
def test_errors_suggest_the_nearest_known_name(name, known, hint):
    assert nearest(name, known) == hint
    assert nearest(name, iter(known)) == hint


def test_the_nearest_of_many_or_long_names_is_found_in_limited_time():
    begin = time.process_time()
    names = ["x" * 1_000_000, *(f"weight{number}" for number in range(200_000))]
    assert nearest("weights", names).startswith(" Did you mean 'weight")
    assert time.process_time() - begin < 2
