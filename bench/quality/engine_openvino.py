"""Runs OpenVINO with a converted model and the settings of the speed benchmark (bfloat16)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from quality.positions import AnyRecorder


def run(job: Mapping[str, Any], recorder: AnyRecorder) -> dict[str, Any]:
    """Compute the logits of all chunks."""
    path = Path(job["model"]) / "openvino_model.xml"
    core = openvino.Core()
    properties = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": "bf16"}
    request = core.compile_model(path, "CPU", {**properties, **job["options"]})
    request = request.create_infer_request()
    for text, chunks in job["chunks"].items():
        for number, ids in enumerate(chunks):
            recorder.begin(text, number, ids)
            request.reset_state()
            tokens = np.array([ids], dtype=np.int64)
            inputs = {
                "input_ids": tokens,
                "attention_mask": np.ones_like(tokens),
                "position_ids": np.arange(len(ids), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
            logits_PV = request.infer(inputs)["logits"][0]
            recorder.add(np.asarray(logits_PV[:-1], dtype=np.float32))
            recorder.end()
    return {
        "bytes_per_weight": path.with_suffix(".bin").stat().st_size / job["num_weights"],
        "versions": {"openvino": version("openvino")},
    }
