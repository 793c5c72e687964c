"""A new engine operation needs two edits: a declaration in the port and a method of the core."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import dovetail
from dovetail.engine.core import EngineCore
from dovetail.engine.port import OPERATIONS

HERE = Path(__file__).parent
CORE = Path(dovetail.__file__).parent

EDITS = {
    "engine/port.py": (
        "    @operation()\n    def pause(",
        '''    @operation(while_paused=False)
    def count_requests(self, names: Sequence[str] = (), *, scale: float = 1.0) -> dict[str, float]:
        """Count the requests, and some names."""

''',
    ),
    "engine/core.py": (
        "    def pause(",
        """    def count_requests(self, names: Sequence[str], scale: float) -> dict[str, float]:
        depth = self.scheduler.depth()
        return {
            "requests": scale * (depth.num_running + depth.num_waiting),
            "names": scale * len(names),
        }

""",
    ),
}
"""Maps each edited file to the insertion point and the inserted text."""

REFUSED = "count_requests cannot be called while the engine is paused; resume it."
EXPECTED = [{"requests": 1.0, "names": 0.0}, {"requests": 2.5, "names": 5.0}, REFUSED]


def test_two_edits_add_an_engine_operation_to_every_client(tmp_path):
    shutil.copytree(CORE, tmp_path / "dovetail", ignore=shutil.ignore_patterns("__pycache__"))
    for name, (anchor, added) in EDITS.items():
        file = tmp_path / "dovetail" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(anchor) == 1
        file.write_text(text.replace(anchor, added + anchor), encoding="utf-8")
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "architectures": ["ControlledWorker"],
        "vocab_size": 97,
        "max_position_embeddings": 512,
    }
    (model / "config.json").write_text(json.dumps(config | {"step_s": 0.01}))
    process = subprocess.run(
        [sys.executable, str(HERE / "new_operation.py"), str(model)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(HERE)))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout)
    assert len(results) == 6 and all(actual == EXPECTED for actual in results.values()), results


def test_every_operation_is_implemented_by_the_engine_core():
    for name in OPERATIONS:
        assert callable(getattr(EngineCore, name, None)), name
