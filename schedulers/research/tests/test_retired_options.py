"""The error for a renamed option or hook gives the new name."""

from __future__ import annotations

import pytest

from dovetail.errors import ConfigError
from dovetail.plugins import PluginRegistry
from dovetail_sched_research.one_order import OneOrderPolicy


def load(name, **options):
    return PluginRegistry(options={name: options}).load("policy", name)


@pytest.mark.parametrize("name", ["edf", "mlfq"])
def test_the_error_for_an_old_option_names_the_new_option(name):
    with pytest.raises(ConfigError, match=r"no option 'displace'\. It was renamed; use 'preempt'"):
        load(name, displace=False)
    with pytest.raises(ConfigError, match="Did you mean 'preempt'"):
        load(name, pre_empt=False)
    load(name, preempt=False)


def test_the_error_for_an_old_hook_names_the_new_hook():
    with pytest.raises(TypeError, match=r"Old\.may_displace was renamed; define may_preempt"):
        type("Old", (OneOrderPolicy,), {"may_displace": lambda *_: False})
    type("New", (OneOrderPolicy,), {"may_preempt": lambda *_: False})
