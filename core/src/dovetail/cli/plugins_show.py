"""`dovetail plugins show`: prints the details of one plugin.

The plugin is imported only with --load.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_json, print_table
from dovetail.errors import PluginError
from dovetail.plugins.plugin_details import (
    LoadedClass,
    PluginDetails,
    collect_plugin_details,
    load_class,
    parse_plugin,
)
from dovetail.plugins.registry import PluginRegistry
from dovetail.plugins.resolving.plugin_policy import PluginPolicy

_PLUGIN_HELP = "KIND:NAME, such as attention:torch; or KIND:NAME@DISTRIBUTION, KIND:module:Class."
_LOAD_HELP = "Import the plugin, check its contract, and show what its class declares."
_TRUST_HELP = "Allow --load to run a plugin that is named as ./file.py:Class."
_JSON_HELP = "Write a JSON object instead of a table."


def show(
    plugin: Annotated[str, Parameter(help=_PLUGIN_HELP)],
    /,
    *,
    load: Annotated[bool, Parameter(negative="", help=_LOAD_HELP)] = False,
    trust_local_code: Annotated[bool, Parameter(negative="", help=_TRUST_HELP)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help=_JSON_HELP)] = False,
) -> int:
    """Show the details of one plugin.

    Without --load the plugin is not imported: only metadata, its manifest and its source are read.
    """
    registry = PluginRegistry(policy=PluginPolicy(trust_local_code=trust_local_code))
    kind, reference = parse_plugin(plugin, registry)
    details = collect_plugin_details(registry, kind, reference)
    loaded, problem = None, ""
    if load:
        try:
            loaded = load_class(registry, kind, reference)
        except PluginError as error:
            problem = str(error)
    if as_json:
        print_json({"plugin": details, "loaded": loaded, "problem": problem})
    else:
        rows = [*_described(details), *(_declared(loaded) if loaded is not None else ())]
        print_table(("", ""), rows)
    if problem:
        print(f"dovetail: {problem}", file=sys.stderr)
    return 1 if problem else 0


def _described(details: PluginDetails) -> list[tuple[str, str]]:
    about, entry = details.description, details.description.entry
    distribution = f"{about.distribution} {about.version}".strip() or "none (named by its class)"
    rows = [
        ("plugin", f"{about.kind}:{about.name}"),
        ("class", about.target),
        ("distribution", distribution + (" (first-party)" if about.first_party else "")),
        ("source", str(details.source or "unknown; use --load to import the plugin")),
        ("contract", f"{details.contract} {details.core_version}"),
        ("manifest", "dovetail.toml" if about.in_manifest else "none; default values apply"),
        ("api", _api_text(details)),
        ("provides", _listed(entry.provides)),
        ("needs", _listed(entry.needs)),
        ("rank", str(entry.rank)),
        ("roles", _listed(entry.roles)),
        ("probe", entry.probe or "none"),
        ("options", _options_text(details)),
    ]
    if entry.verified:
        rows.append(("verified", entry.verified))
    if entry.replaces:
        rows.append(("replaces", f"{_listed(entry.replaces)}, if plugins_allow contains it"))
    return rows


def _api_text(details: PluginDetails) -> str:
    api = details.description.entry.api
    if not api:
        return "any"
    if details.fits:
        return f"{api}, which contains the core's version {details.core_version}"
    return f"{api}, which does NOT contain the core's version {details.core_version}"


def _options_text(details: PluginDetails) -> str:
    model = details.description.entry.options
    if not model:
        return "none"
    if details.options is None:
        return f"{model} (use --load to read its fields)"
    lines = [
        f"{option.name}: {option.type}"
        + (f" = {option.default}" if option.default else " (required)")
        for option in details.options
    ]
    return "\n".join([model, *lines])


def _declared(loaded: LoadedClass) -> list[tuple[str, str]]:
    rows = [
        ("loaded", "yes; it implements its contract"),
        ("its version", loaded.contract_version or "not declared"),
        ("it provides", _listed(loaded.provides)),
        ("it needs", _listed(loaded.needs)),
    ]
    rows += [(name, _value_text(value)) for name, value in loaded.attributes.items()]
    return rows + [("note", note) for note in loaded.notes]


def _value_text(value: Any) -> str:
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None:
        return _listed(value) if isinstance(value, (frozenset, tuple)) else str(value)
    parts = [(name, getattr(value, name)) for name in fields]
    # An empty set may mean "none" or "any", depending on the contract.
    return "\n".join(f"{name}: {_value_text(item) if item else '–'}" for name, item in parts)


def _listed(values: Any) -> str:
    values = sorted(values) if isinstance(values, frozenset) else values
    return ", ".join(map(str, values)) or "none"
