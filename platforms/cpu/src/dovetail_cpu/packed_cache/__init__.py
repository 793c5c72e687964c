"""Packed weights kept on disk from one start to the next: mapped instead of made again.

`PackedCache` is all that others need. The threat model: the folder is the user's own and nobody
else may write there (checked), so that files are held against accidents, not against forgery.
Everything in it may be deleted at any time, also while an engine runs.
"""

from dovetail_cpu.packed_cache.cache import PackedCache, default_folder
from dovetail_cpu.packed_cache.folder import PackedFolder
from dovetail_cpu.packed_cache.packed_form import PACKED_FORM, HasPackedForm

__all__ = ["PACKED_FORM", "HasPackedForm", "PackedCache", "PackedFolder", "default_folder"]
