"""Selects the provider: the requested one, or the first that meets all requirements."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import ConfigError
from dovetail_attn_flash_attn.options import AUTO
from dovetail_attn_flash_attn.providers.provider import Needs, Provider


def rejections(providers: Sequence[Provider], needs: Needs, *, load: bool) -> list[str]:
    """Return one reason for each provider, or [] if a provider meets `needs`.

    load: whether to import the kernels of a provider that meets all other needs.
    """
    reasons = []
    for provider in providers:
        reason = provider.rejection(needs, load=load)
        if not reason:
            return []
        reasons.append(reason)
    return reasons


def select_provider(
    providers: Sequence[Provider], needs: Needs, requested: str, owner: str
) -> Provider:
    """Return the selected provider, with its kernels imported.

    requested: the `provider` option. owner: the part that needs the provider, for the error. Raises
    ConfigError if no provider meets `needs`, or the requested one does not.
    """
    if requested != AUTO:
        providers = [provider for provider in providers if provider.name == requested]
    reasons = []
    for provider in providers:
        reason = provider.rejection(needs, load=True)
        if not reason:
            return provider
        reasons.append(reason)
    option = "" if requested == AUTO else f" with the option provider={requested!r}"
    raise ConfigError(
        f"the attention backend 'flash_attn'{option} cannot compute {owner}: {' | '.join(reasons)}"
    )
