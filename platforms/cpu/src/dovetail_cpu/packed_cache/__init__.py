"""Packed weights cached on disk: a later start maps them instead of repacking.

Other modules import only `PackedCache`. Threat model: the directory belongs to the user and no
other user may write there (checked), so files are protected against accidents, not against forgery.
Everything in it may be deleted at any time, even while an engine runs.
"""

from dovetail_cpu.packed_cache.cache import PackedCache, default_folder, packed_folder
from dovetail_cpu.packed_cache.packed_form import PACKED_FORM, HasPackedForm

__all__ = ["PACKED_FORM", "HasPackedForm", "PackedCache", "default_folder", "packed_folder"]
