"""Checks this machine, this environment and the installed plugins.

Each check returns findings (`Finding`): the subject, the verdict and the remedy. Plugins are loaded
in separate processes, so that a plugin that hangs or exits does not affect the doctor. The checks
change nothing and print nothing.
"""

from dovetail_devkit.doctor.examination import examine
from dovetail_devkit.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding

__all__ = ["BROKEN", "NOTE", "OK", "WARNING", "Finding", "examine"]
