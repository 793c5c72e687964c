"""Packed weights cached on disk: a later start maps them instead of repacking.

Other packages use `cache.PackedCache`, `folder`, `packed_form` and `prefetch`. `folder` and
`prefetch` do not import torch. Threat model: the directory belongs to the user and no
other user may write there (checked), so files are protected against accidents, not against forgery.
Everything in it may be deleted at any time, even while an engine runs.
"""
