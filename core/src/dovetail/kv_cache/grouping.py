"""Puts layers into KV-cache groups that share a block table.

All groups share block ids and memory: the i-th layer of every group uses the pages of buffer i, so
that any group can use a block. Memory is wasted if layers need pages of different sizes, and if
groups have different numbers of layers. So the block size of a group is chosen to match page sizes:
layers with small caches get more tokens per block, or share a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul

from dovetail.errors import ModelError
from dovetail.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    NoCacheSpec,
    StateSpec,
    aligned,
)
from dovetail.kv_cache.kinds import kind_of
from dovetail.value_checks import shorten

_SLACK = 1.1
"""Use up to this many times the memory to get fewer groups, because each group costs host time."""

_MAX_WASTE = 1.25
"""Maximum memory to use for fewer groups, as a multiple of the bytes that the layers need."""

_MULTIPLES = range(1, 13)
"""Page sizes to try, as multiples of the smallest page in which the largest spec fits."""

_INTERVALS = (1, 4, 16, 64, 256)
"""Block sizes to try for states with snapshots, as multiples of attention's largest block."""

_MANY_GROUPS = 8
"""With more groups than this, attention layers may share pages to reduce the groups."""

_SHARED = (1, 2, 4, 8, 16, 32)
"""Attention layers per page to try, if one page per layer takes too much memory."""

Groups = tuple[KVCacheGroup, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers with the same spec. per_page: number of layers that share a page."""

    spec: KVCacheSpec
    names: Sequence[str]
    per_page: int = 1

    @property
    def num_pages(self) -> int:
        return -(-len(self.names) // self.per_page)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to group the layers.

    size: maximum pages of a group. num_bytes: bytes of one sequence, for each relevant length.
    """

    parts: Sequence[_Part]
    size: int
    num_bytes: Sequence[int]

    @property
    def num_groups(self) -> int:
        return sum(-(-part.num_pages // self.size) for part in self.parts)

    def groups(self) -> Groups:
        """Divide the layers of each spec into groups, in the order of the layers."""
        groups = []
        for part in self.parts:
            maximum = self.size * part.per_page
            for start in range(0, len(part.names), maximum):
                names = tuple(part.names[start : start + maximum])
                per_page = min(part.per_page, len(names))
                group = KVCacheGroup(layer_names=names, spec=part.spec, layers_per_page=per_page)
                groups.append(group)
        return tuple(groups)


def group_layers(
    specs_by_rank: Sequence[Mapping[str, KVCacheSpec]],
    *,
    block_size: int,
    max_model_len: int,
    max_step_tokens: int = 0,
) -> Groups:
    """Put the layers into groups that share a block table.

    block_size: the block size if no layer of the model has a cache. max_model_len: maximum tokens
    of a sequence. Groups are chosen by the memory for a sequence of this length and of an eighth of
    it.
    max_step_tokens: maximum tokens of a sequence per step; 0 for one block. The block size of a
    group is a multiple of the one in its layers' specs.
    Layers with sliding windows get separate groups if that saves memory. Otherwise they share a
    group with full attention, and only the attention backend applies the window.
    Raises ModelError if the ranks disagree, the specs' block sizes differ, or a layer has a wrong
    window or chunk size.
    """
    specs = specs_by_rank[0]
    if any(other != specs for other in specs_by_rank[1:]):
        raise ModelError("The workers returned different KV-cache specs; check their models.")
    if not specs:
        return (KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=block_size)),)
    if len({spec.block_size for spec in specs.values()}) > 1:
        shapes = "; ".join(f"{name}: {spec.block_size}" for name, spec in specs.items())
        raise ModelError(
            "the specs of all layers must have the same block_size, but their block sizes are "
            f"{shapes}"
        )
    for name, spec in specs.items():
        _check_span(name, spec)
    step = max_step_tokens or next(iter(specs.values())).block_size
    max_needed = _MAX_WASTE * needed_bytes(specs, max_model_len, step)
    lengths = (max_model_len, max(1, max_model_len // 8))
    choices: list[_Choice] = []
    for shared in _SHARED:
        for keep_windows in (False, True):
            collected = _collect(specs, keep_windows=keep_windows)
            for parts in _matched(collected, shared, max_model_len):
                choices += _cut(parts, lengths, step)
        best = _best(choices, max_needed)
        if best.num_bytes[0] <= max_needed and best.num_groups <= _MANY_GROUPS:
            break
    return best.groups()


def _check_span(name: str, spec: KVCacheSpec) -> None:
    """Raise ModelError if an attention layer has both a window and chunks, or invalid ones."""
    if not isinstance(spec, FullAttentionSpec):
        return
    window, chunk_size = spec.sliding_window, spec.chunk_size
    is_valid = all(type(size) is int and size >= 0 for size in (window, chunk_size))
    if not is_valid or (window and chunk_size):
        raise ModelError(
            f"the KV-cache spec of {name} has sliding_window={shorten(window)} and "
            f"chunk_size={shorten(chunk_size)}; both must be integers of at least 0, and one must "
            "be 0"
        )


def _best(choices: Sequence[_Choice], max_needed: float) -> _Choice:
    """Return the candidate with the fewest groups among candidates with nearly minimal memory."""
    for index in range(len(choices[0].num_bytes)):
        minimum = min(choice.num_bytes[index] for choice in choices)
        maximum = max(minimum, min(_SLACK * minimum, max_needed))
        choices = [choice for choice in choices if choice.num_bytes[index] <= maximum]
    return min(
        choices,
        key=lambda item: (
            item.num_groups,
            max(part.spec.block_size for part in item.parts),
            item.num_bytes,
        ),
    )


def needed_bytes(specs: Mapping[str, KVCacheSpec], num_tokens: int, max_step_tokens: int) -> int:
    """Return the maximum bytes that the layers need for one sequence, without unused memory.

    In addition to the window of a step's first token, all tokens of the step are kept.
    """
    total = 0
    for spec in specs.values():
        kind = kind_of(spec)
        if isinstance(spec, StateSpec):
            # With snapshots, one state is read and another one is written.
            num_states = 2 if kind.positional and num_tokens > 1 else 1
            total += num_states * spec.num_bytes
            continue
        kept = min(num_tokens, kind.span - 1 + max_step_tokens) if kind.sheds else num_tokens
        total += kept * spec.page_size_bytes // spec.block_size
    return total


def padding_share(groups: Groups) -> float:
    """Return the fraction of KV-cache memory that is padding, 0 to 1.

    All groups have the same number of blocks. Padding arises in groups with fewer layers than the
    largest group, and from layers with smaller pages.
    """
    config = KVCacheConfig(num_blocks=1, groups=groups)
    total = config.bytes_per_block * len(groups)
    return 1 - sum(group.bytes_per_block for group in groups) / total if total else 0.0


def _collect(specs: Mapping[str, KVCacheSpec], *, keep_windows: bool) -> list[_Part]:
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        if isinstance(spec, FullAttentionSpec) and not keep_windows:
            spec = replace(spec, sliding_window=0, chunk_size=0)
        layers.setdefault(spec, []).append(name)
    return [_Part(spec, names) for spec, names in layers.items()]


def _matched(parts: Sequence[_Part], shared: int, max_model_len: int) -> Iterator[Sequence[_Part]]:
    """Yield `parts` with block sizes that give pages of about equal size.

    shared: attention layers per page. A state's block that no sequence fills would never be found
    in the prefix cache, so blocks of states are not longer than a sequence.
    """
    pages = {part.spec.page_size_bytes for part in parts}
    states = any(isinstance(item.spec, StateSpec) and item.spec.snapshots for item in parts)
    if len(pages) == 1 and not states:
        yield parts
        return
    targets = {max(pages)}
    for page in map(aligned, pages - {0}):
        targets |= {-(-max(pages) // page) * page * times for times in _MULTIPLES}
    for target in sorted(targets):
        for interval in _INTERVALS if states else (1,):
            created = _with_pages(parts, target, interval, shared)
            if interval == 1 or _largest_state_block(created) <= max_model_len:
                yield created


def _largest_state_block(parts: Sequence[_Part]) -> int:
    sizes = (part.spec.block_size for part in parts if isinstance(part.spec, StateSpec))
    return max(sizes, default=0)


def _with_pages(
    parts: Sequence[_Part], num_bytes: int, interval: int, shared: int
) -> Sequence[_Part]:
    """Return `parts` with the largest blocks that fit into pages of `num_bytes`.

    interval: tokens of a state's block, as a multiple of the largest attention block.
    shared: attention layers per page, if they fit.
    """
    created, largest = [], 0
    for part in parts:
        spec, own = part.spec, part.spec.page_size_bytes
        if isinstance(spec, StateSpec) or not own:
            continue
        per_page = max(1, min(shared, num_bytes // aligned(own), len(part.names)))
        size = spec.block_size * max(1, num_bytes // per_page // own)
        largest = max(size, largest)
        created.append(_Part(replace(spec, block_size=size), part.names, per_page))
    for part in parts:
        spec, own = part.spec, part.spec.page_size_bytes
        if not isinstance(spec, StateSpec) and own:
            continue
        size = interval * (largest or spec.block_size)
        per_page = min(len(part.names), num_bytes // aligned(own)) if own else 1
        created.append(_Part(replace(spec, block_size=size), part.names, max(1, per_page)))
    return created


def _cut(parts: Sequence[_Part], lengths: Sequence[int], max_step_tokens: int) -> Iterator[_Choice]:
    """Yield the ways to divide the layers of each spec into groups of limited size."""
    page = _page_bytes(parts)
    kinds = [kind_of(part.spec) for part in parts]
    maximum = [[kind.max_blocks(length, max_step_tokens) for kind in kinds] for length in lengths]
    for size in range(1, max(part.num_pages for part in parts) + 1):
        groups = [-(-part.num_pages // size) for part in parts]
        num_blocks = [sum(map(mul, groups, blocks)) for blocks in maximum]
        yield _Choice(parts, size, [blocks * size * page for blocks in num_blocks])


def _page_bytes(parts: Sequence[_Part]) -> int:
    groups = _Choice(parts, 1, ()).groups()
    return KVCacheConfig(num_blocks=1, groups=groups).page_size_bytes
