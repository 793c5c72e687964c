"""New plugin packages: small, whole, working ones, to be changed and not to be filled in.

`write_package` writes what `dovetail plugins new` promises: a package that installs and passes the
conformance suite of its kind as it is. Knows the contracts' names and versions; imports no plugin
and no tensor library. The files stand in `templates`, one folder a kind.
"""

from dovetail_devkit.scaffold.blueprint import BLUEPRINTS, Blueprint, get_blueprint
from dovetail_devkit.scaffold.package import NewPackage, write_package
from dovetail_devkit.scaffold.plugin_name import PluginName, name_plugin

__all__ = [
    "BLUEPRINTS",
    "Blueprint",
    "NewPackage",
    "PluginName",
    "get_blueprint",
    "name_plugin",
    "write_package",
]
