"""The pytest plugin of `pytest --dovetail-plugin KIND:NAME`, which runs each case as a test.

The plugin works in any directory, without a conftest, and with `-k`, `-x`, `-v` and `-n`. Without
paths on the command line, no other tests are collected. An unknown kind or name is a usage error.
pytest always loads this module if dovetail-devkit is installed, so suites, plugins and tensor
libraries are imported only if the option is given.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase

if TYPE_CHECKING:
    from dovetail.config.model_directory import ModelDirectory
    from dovetail_devkit.plugin_cases import PluginSubject

_MODEL = pytest.StashKey["ModelDirectory | None"]()

NUM_REASONS_SHOWN = 5
_COUNTED = ("passed", "failed", "error", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("dovetail", "options of the conformance kit for Dovetail plugins")
    group.addoption(
        "--dovetail-plugin",
        action="append",
        default=[],
        metavar="KIND:NAME",
        help="plugin to check against its contract; NAME is a plugin name, name@distribution or "
        "package.module:Class (can be repeated)",
    )
    group.addoption(
        "--dovetail-model-dir",
        metavar="DIR",
        help="directory of a small model for the suites (default: a model written by the kit)",
    )
    group.addoption(
        "--dovetail-platform",
        metavar="NAME",
        default="auto",
        help="platform on which workers are tested (default: a platform that prefers the worker)",
    )
    group.addoption(
        "--dovetail-device",
        metavar="TYPE",
        default="",
        help="type of the device to test on (default: the first available type)",
    )
    group.addoption(
        "--dovetail-plugin-options",
        metavar="JSON",
        default="{}",
        help="options of the plugins as a JSON object {NAME: {KEY: VALUE}}",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Load the requested plugins. Raise UsageError, on one line, if one is not found."""
    requested: list[str] = config.getoption("dovetail_plugin")
    if not requested:
        return
    import sys

    config.stash[_MODEL] = _open_model(config)
    here = str(config.invocation_params.dir)
    if here not in sys.path:
        # like `python -m pytest`, but at the end of the path, so that it hides no other module
        sys.path.append(here)
    candidates = [_find(config, item) for item in requested]
    config.pluginmanager.register(_Kit(config, candidates))


def _find(config: pytest.Config, requested: str) -> PluginSubject:
    from dovetail.errors import DovetailError, PluginError, PluginNotFoundError
    from dovetail.plugins import get_kind
    from dovetail_devkit.plugin_cases import PluginSubject, make_registry

    kind, colon, reference = requested.partition(":")
    if not colon or not reference:
        raise _usage_error(requested, "write the plugin as KIND:NAME, such as attention:torch")
    try:
        get_kind(kind)
        registry = make_registry(_read_options(config))
        registry.resolve(kind, reference)
        cls = registry.load(kind, reference)
    except PluginNotFoundError as error:
        raise _usage_error(requested, str(error)) from None
    except PluginError as error:
        return PluginSubject(kind=kind, reference=reference, registry=registry, error=error)
    except DovetailError as error:
        raise _usage_error(requested, str(error)) from None
    return PluginSubject(kind=kind, reference=reference, registry=registry, cls=cls)


def _open_model(config: pytest.Config) -> ModelDirectory | None:
    from dovetail.config.model_directory import ModelDirectory
    from dovetail.errors import ModelError

    model_dir = config.getoption("dovetail_model_dir")
    try:
        return ModelDirectory.open(model_dir) if model_dir else None
    except ModelError as error:
        message = " ".join(str(error).split())
        raise pytest.UsageError(
            f"--dovetail-model-dir {model_dir!r} cannot be used: {message}"
        ) from None


def _read_options(config: pytest.Config) -> dict[str, Any]:
    text: str = config.getoption("dovetail_plugin_options")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise pytest.UsageError(
            f"--dovetail-plugin-options {text!r} is not valid JSON: {error}"
        ) from None
    if not isinstance(options, dict):
        raise pytest.UsageError(f"--dovetail-plugin-options {text!r} must be a JSON object")
    return options


def _usage_error(requested: str, reason: str) -> pytest.UsageError:
    return pytest.UsageError(f"--dovetail-plugin {requested!r}: {' '.join(reason.split())}")


class _Kit:
    """Adds the requested plugins to a pytest session."""

    def __init__(self, config: pytest.Config, subjects: list[PluginSubject]) -> None:
        self._config = config
        self._subjects = subjects
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []  # do not collect the tests of the current directory

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Add the plugins to the session's collectors."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            collectors = [PluginCollector.of(collector, subject) for subject in self._subjects]
            report.result = [*(report.result or ()), *collectors]
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report how many cases of each plugin passed, failed or were skipped, with the reasons."""
        terminalreporter.section("dovetail conformance")
        for subject in self._subjects:
            reports = {
                outcome: [
                    report
                    for report in terminalreporter.stats.get(outcome, ())
                    if report.nodeid.startswith(f"{subject}::")
                ]
                for outcome in _COUNTED
            }
            counts = ", ".join(
                f"{len(reports_of_outcome)} {outcome}"
                for outcome, reports_of_outcome in reports.items()
            )
            terminalreporter.write_line(f"{subject}: {counts}")
            texts = (str(report.longrepr[2]) for report in reports["skipped"])
            reasons = Counter(text.removeprefix("Skipped: ") for text in texts)
            for reason, count in reasons.most_common(NUM_REASONS_SHOWN):
                terminalreporter.write_line(f"  {count} skipped: {reason}")


class PluginCollector(pytest.Collector):
    """Collects the cases of one plugin."""

    subject: PluginSubject
    stack: ExitStack

    @classmethod
    def of(cls, session: pytest.Session, subject: PluginSubject) -> PluginCollector:
        """Return the collector of a plugin."""
        created: PluginCollector = cls.from_parent(session, name=str(subject), nodeid=str(subject))
        created.subject = subject
        created.stack = ExitStack()
        return created

    def collect(self) -> Iterator[CaseItem]:
        """Yield an item for each case."""
        for case in self._cases():
            item: CaseItem = CaseItem.from_parent(self, name=case.name)
            item.case = case
            yield item

    def teardown(self) -> None:
        """Release the resources that the cases share."""
        self.stack.close()

    def _cases(self) -> Iterator[Case]:
        from dovetail_devkit.kit import suite_cases
        from dovetail_devkit.kit_subjects import Subjects
        from dovetail_devkit.plugin_cases import plugin_cases, unusable_reason

        subject, option = self.subject, self.config.getoption
        yield from plugin_cases(subject)
        if subject.cls is None:
            return
        subjects = Subjects(
            registry=subject.registry,
            stack=self.stack,
            model=self.config.stash[_MODEL],
            platform=option("dovetail_platform"),
            device=option("dovetail_device"),
            unusable=unusable_reason(subject),
        )
        yield from suite_cases(subject.kind, subject.cls, subjects)


class CaseItem(pytest.Item):
    """Runs one case as a test."""

    case: Case

    def runtest(self) -> None:
        """Run the case. Skip it if it does not apply, with the reason."""
        try:
            self.case.run()
        except SkipCase as reason:
            pytest.skip(str(reason))

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> str | Any:
        """Show the violated rule, and the plugin's traceback if it raised."""
        error = excinfo.value
        if not isinstance(error, AssertionError) or self.config.getoption("verbose") > 1:
            return super().repr_failure(excinfo, style)
        text = str(error)
        cause = error.__cause__
        while isinstance(cause, AssertionError):
            cause = cause.__cause__
        if cause is not None:
            text += f"\n\n{''.join(traceback.format_exception(cause, chain=False))}"
        return text

    def reportinfo(self) -> tuple[Any, None, str]:
        """Return the location for reports."""
        return self.path, None, self.nodeid
