"""Importing a retired name raises an ImportError that states the new name."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

from dovetail.errors import ContractError
from dovetail.plugins.contracts.checks import check_contract
from dovetail.retired_names import RETIRED_IMPORTS
from dovetail_devkit.fakes.attention import FakeAttentionBackend

IMPORTS = [(module, *pair) for module, names in RETIRED_IMPORTS.items() for pair in names.items()]


@pytest.mark.parametrize(("module", "old", "new"), IMPORTS)
def test_the_error_for_importing_an_old_name_states_the_new_name(module, old, new):
    """`from module import name` in a plugin fails. The new name in the message exists."""
    with pytest.raises(ImportError) as rejection:
        exec(f"from {module} import {old}")  # a plugin would use this import statement
    assert f"Use {module}.{new}." in str(rejection.value)
    assert getattr(import_module(module), new) is not None


@pytest.mark.parametrize("module", RETIRED_IMPORTS)
def test_names_that_never_existed_raise_the_usual_errors(module):
    with pytest.raises(ImportError, match="cannot import name 'Typo'"):
        exec(f"from {module} import Typo")
    assert not hasattr(import_module(module), "Typo")


def test_the_error_for_importing_the_old_devkit_names_the_new_package():
    with pytest.raises(ImportError, match="dovetail_devkit"):
        import_module("dovetail.testing.fake_worker")


def test_an_attention_backend_with_a_retired_feature_name_is_rejected_with_the_new_name():
    class Old(FakeAttentionBackend):
        capabilities = replace(FakeAttentionBackend.capabilities, features=frozenset({"counts_on"}))

    class New(FakeAttentionBackend):
        capabilities = replace(
            FakeAttentionBackend.capabilities, features=frozenset({"supports_advance"})
        )

    with pytest.raises(
        ContractError, match=r"'counts_on'\. It was renamed; use 'supports_advance'"
    ):
        check_contract("attention", Old)
    check_contract("attention", New)
