"""Loads damaged GGUF files in a separate process.

    python -m security.hostile_gguf_runs FIRST COUNT FOLDER

loads the files FIRST to FIRST + COUNT - 1 and prints a report as JSON: the number of outcomes, the
longest time, the growth of the peak memory, and every case that broke a rule.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from security.hostile_gguf import make_variant, write_damaged

from dovetail.config import EngineArgs
from dovetail.errors import DovetailError, RequestError
from dovetail.plugins import PluginRegistry
from dovetail_gguf.tokenizer import GGUFTokenizer


class Victim:
    """Loads a file as an engine does: description, tokenizer, chat template, weights."""

    def __init__(self) -> None:
        import torch

        from dovetail.interfaces import ModelContext, WeightLoaderContext
        from dovetail_torch.layers import TorchLinearMethod, TorchOps

        self._registry = PluginRegistry()
        self._loader_cls = self._registry.load("weight_loader", "gguf")
        self._make_loader_context = WeightLoaderContext
        self._context = lambda config: ModelContext(
            hf_config=config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            linear_method=TorchLinearMethod(),
            ops=TorchOps(),
            max_model_len=64,
        )
        self._configs: dict[str, dict[str, Any]] = {}

    def load(self, path: Path) -> None:
        """Use all data of the file. Raise DovetailError if the file is damaged."""
        actual = EngineArgs(str(path)).create_engine_config().model
        tokenizer = GGUFTokenizer.from_directory(path)
        tokenizer.decode(tokenizer.encode("hello <s> \u00e9"))
        tokenizer.encode_pair("hello", "x" * 200)
        architecture = actual.architecture
        # The first file of each architecture is valid.
        config = self._configs.setdefault(architecture, dict(actual.hf_config))
        model = self._registry.load("model", architecture)(self._context(config))
        context = self._make_loader_context(model_dir=path, progress=False)
        self._loader_cls(context).load(model)
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def main(first: int, count: int, folder: Path) -> dict[str, Any]:
    """Load `count` damaged files. Return the report."""
    victim, valid = Victim(), folder / "valid.gguf"
    for number in range(6):  # every variant
        valid.write_bytes(make_variant(number).to_bytes())
        victim.load(valid)
    outcomes: Counter[str] = Counter()
    broken, slowest = [], 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + count):
        path, *_ = paths = write_damaged(folder, number)
        start = time.monotonic()
        try:
            victim.load(path)
            outcome = "accepted"
        except DovetailError as error:
            outcome = type(error).__name__
            named = any(item.name in str(error) for item in paths)
            if not isinstance(error, RequestError) and not named:
                broken.append(f"{number}: not named: {str(error)[:300]}")
        except BaseException as error:
            outcome = "untyped"
            broken.append(f"{number}: {type(error).__name__}: {str(error)[:300]}")
        slowest = max(slowest, time.monotonic() - start)
        outcomes[outcome] += 1
        for item in paths:
            item.unlink()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "outcomes": outcomes,
        "broken": broken,
        "slowest_s": slowest,
        "growth_mib": growth / 1024,
    }


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
