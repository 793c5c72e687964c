"""The conformance suite of the hooks contract, for any hooks plugin.

This module needs no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from cyclopts import App

from dovetail.errors import RequestError
from dovetail.interfaces.hooks import Hooks, HooksContext
from dovetail.plugins.hooks import HOOK_NAMES, HookPlugins
from dovetail_devkit.contexts import make_config, write_fake_config
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.suites.stat_logger import make_step

NUM_STEPS = 100


@checking("hooks")
def check_hooks(hooks_cls: type[Hooks], *, options: Mapping[str, object] | None = None) -> None:
    """Call all hooks as an engine and a command do.

    Raises AssertionError if a hook violates a rule.

    options: constructor options; None for none.
    """
    context = HooksContext(options=options or {})
    hooks = HookPlugins({"judged": hooks_cls(context)})
    overridden = [name for name in HOOK_NAMES if hooks.subscribers(name)]
    expect(
        bool(overridden),
        f"the plugin must override at least one of the hooks {', '.join(HOOK_NAMES)}",
    )
    HookPlugins({"command_line": hooks_cls(context)}).notify("register_cli", app=App(name="judge"))
    with TemporaryDirectory() as folder:
        config = make_config(write_fake_config(Path(folder)))
        before = config.model_dump()
        hooks.notify("on_engine_start", config=config)
        expect(config.model_dump() == before, "on_engine_start must not change the configuration")
        for step_id in range(NUM_STEPS):
            hooks.notify("on_step", step=make_step(step_id, now_ns=step_id))
        error = RequestError("requested failure", parameter="prompt")
        hooks.notify("on_request_error", request_id="a", error=error)
        hooks.notify("on_engine_stop")
