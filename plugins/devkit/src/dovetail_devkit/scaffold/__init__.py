"""Creates new plugin packages: small working plugins as a starting point.

`write_package` writes a package that can be installed and passes the conformance suite of its kind
without changes. This module imports no plugin and no tensor library. The templates are in
`templates`, with one directory for each kind.
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
