"""The doctor: finds what is wrong with this machine, this environment and the plugins here.

Each thing looked at gives a `Finding`: what it is, how it is, and how to fix it. Plugins are
loaded in processes of their own, so that one that hangs or ends its process harms nothing. Changes
nothing and prints nothing.
"""

from dovetail_devkit.doctor.examination import examine
from dovetail_devkit.doctor.finding import BROKEN, NOTE, OK, WARNING, Finding

__all__ = ["BROKEN", "NOTE", "OK", "WARNING", "Finding", "examine"]
