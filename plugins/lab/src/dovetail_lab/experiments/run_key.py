"""The identity of a run, and its id: a hash of everything that determines its result."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.selection import choose_scheduler
from dovetail_lab.experiments.spec import ExperimentSpec

_ID_LENGTH = 16
CAPACITY_LOAD = 0.0
"""A special value of `RunKey.load`: the burst run that measures the capacity."""


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """One run of an experiment.

    policy: the policy's name in the experiment. load: fraction of the capacity, or `CAPACITY_LOAD`.
    rate: requests per second; 0 for a burst. engine: "sim" or "real".
    """

    policy: str
    load: float
    rate: float
    seed: int
    engine: str

    def plain(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


@lru_cache
def code_version() -> str:
    """Return the SHA-256 of the sources of the core and of the lab, in hexadecimal."""
    folders = []
    for package in ("dovetail", "dovetail_lab"):
        spec = importlib.util.find_spec(package)
        folders += list(spec.submodule_search_locations or ()) if spec else []
    return _hash_files(path for folder in folders for path in Path(folder).rglob("*.py"))


@lru_cache
def policy_version(reference: str, *, trust_local_code: bool) -> str:
    """Return the SHA-256 of a policy's source code: of its package, or of its file.

    Returns "" if the policy cannot be loaded; its runs then fail with the reason.
    """
    registry = PluginRegistry(policy=PluginPolicy(trust_local_code=trust_local_code))
    try:
        scheduler, policy = choose_scheduler(registry, reference)
    except Exception:  # a class from a file may raise anything
        return ""
    return _source_hash(reference, (policy or scheduler).__module__)


def router_version(reference: str) -> str:
    """Return the SHA-256 of the sources of a router that is a class; "" for a known name."""
    module = reference.rpartition(":")[0]
    try:
        return _source_hash(reference, module) if module else ""
    except (ImportError, ValueError):  # its runs fail with the reason
        return ""


def _source_hash(reference: str, module: str) -> str:
    """Return the SHA-256 of the file that a reference names, or of the package of a module."""
    file = Path(reference.rpartition(":")[0])
    if file.suffix == ".py":
        return _hash_files([file]) if file.is_file() else ""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return ""
    folders = spec.submodule_search_locations
    if folders:
        return _hash_files(path for folder in folders for path in Path(folder).rglob("*.py"))
    return _hash_files([Path(spec.origin)] if spec.origin else [])


def run_id(spec: ExperimentSpec, key: RunKey, fingerprint: str, *, trust_local_code: bool) -> str:
    """Return the id of a run: equal ids mean equal results, except for measured wall times.

    fingerprint: the fingerprint of the workload. The id does not depend on labels or on other runs.
    """
    policy = spec.policy(key.policy)
    router = policy.router or spec.setup.router
    output = {
        "policy": policy.policy,
        "options": policy.options,
        "policy_version": policy_version(policy.policy, trust_local_code=trust_local_code),
        "code_version": code_version(),
        "engine": key.engine,
        "setup": spec.setup.model_dump(),
        "router": [router, router_version(router)],
        "step_times": _step_times_digest(spec),
        "workload": fingerprint,
        "seed": key.seed,
        "cut": asdict(spec.cut),
    }
    text = json.dumps(output, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_ID_LENGTH]


def _step_times_digest(spec: ExperimentSpec) -> str:
    """Return the digest of the step times, or their name if they are invalid (the run fails)."""
    reference = spec.setup.step_time_reference
    try:
        return reference.digest()
    except UserError:
        return reference.name


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
