"""The engine checks parameters of logits processors before a request runs."""

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ContractError, RequestError
from dovetail.scheduling import Scheduler
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.fakes.logits_processor import ARGUMENT, FakeLogitsProcessor
from dovetail_devkit.fakes.platform import FakePlatform
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.fakes.worker import FakeWorker


class Worker(FakeWorker):
    """A worker that declares support for logits processors but does not apply them."""

    provides = frozenset({"logits_processors"})


class FailingParamsCheck(FakeLogitsProcessor):
    @classmethod
    def check_params(cls, params):
        return params.extra_args["weights"][0]


@pytest.fixture
def make(tmp_path):
    created = []

    def build(*processors, worker_cls=Worker):
        created.append(
            LLM(
                write_fake_config(tmp_path, vocab_size=300),
                platform=FakePlatform,
                worker_cls=worker_cls,
                executor_backend="uniproc",
                scheduler_cls=Scheduler,
                tokenizer_mode=ByteTokenizer,
                logits_processors=processors,
                **SMALL_ENGINE,
            )
        )
        return created[-1]

    yield build
    for item in created:
        item.shutdown()


def ask(**extra_args):
    return SamplingParams(max_tokens=2, extra_args=extra_args)


def test_an_invalid_parameter_rejects_only_its_own_request(make):
    llm = make(FakeLogitsProcessor)
    params = [ask(), ask(**{ARGUMENT: "yes"}), ask(**{ARGUMENT: True})]
    valid, bad, asking = llm.generate(["a", "b", "c"], params, on_error="return")
    assert "must be True or False" in bad.error and not bad.outputs
    assert valid.error is None and asking.error is None
    with pytest.raises(RequestError) as caught:
        llm.generate("b", params[1])
    assert caught.value.parameter == f"extra_args.{ARGUMENT}"


def test_a_parameter_check_that_raises_rejects_only_its_own_request(make):
    llm = make(FailingParamsCheck)
    with pytest.raises(
        RequestError, match="'FailingParamsCheck' failed to check extra_args: KeyError"
    ) as caught:
        llm.generate("a", ask())
    assert caught.value.parameter == "extra_args"
    (fine,) = llm.generate("a", ask(weights=[1]))
    assert len(fine.outputs[0].token_ids) == 2


def test_parameters_are_not_checked_without_logits_processors(make):
    llm = make(worker_cls=FakeWorker)
    (fine,) = llm.generate("a", ask(**{ARGUMENT: "whatever"}))
    assert fine.error is None and llm.llm_engine.client.core._rules.params_checks == ()


def test_a_worker_without_logits_processors_is_rejected(make):
    with pytest.raises(ContractError, match="`provides` does not contain 'logits_processors'"):
        make(FakeLogitsProcessor, worker_cls=FakeWorker)


def test_classes_of_the_same_name_in_different_modules_can_be_used_together(make):
    other = type("FakeLogitsProcessor", (FakeLogitsProcessor,), {"__module__": "another_module"})
    llm = make(FakeLogitsProcessor, other)
    assert len(llm.llm_engine.client.core._rules.params_checks) == 2


def test_a_duplicate_logits_processor_is_rejected(make):
    with pytest.raises(ConfigError, match="logits_processors contains 'FakeLogitsProcessor' twice"):
        make(FakeLogitsProcessor, FakeLogitsProcessor)
