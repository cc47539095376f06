"""One optimizer step against TRL 1.16's GRPOTrainer: what bench/parity_step.py froze of its run of the peer."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]


def _bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity_step", ROOT / "bench" / "parity_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity_step"] = module
    spec.loader.exec_module(module)
    return module


BENCH = _bench()


@pytest.mark.parametrize("case", sorted(BENCH.CASES))
def test_a_step_equals_that_of_trl(case: str, tmp_path: Path) -> None:
    frozen = dict(np.load(BENCH.FIXTURE))
    data = {key.removeprefix("in/"): value for key, value in frozen.items() if key.startswith("in/")}
    assert json.loads(str(data["cases"])) == json.loads(json.dumps(BENCH.CASES))  # the fixture is of these cases
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(str(frozen["config"]))
    weights = {key.removeprefix("model/"): value for key, value in frozen.items() if key.startswith("model/")}
    save_file(weights, model / "model.safetensors")
    theirs = {
        key.removeprefix(f"out/{case}|"): value for key, value in frozen.items() if key.startswith(f"out/{case}|")
    }
    ours = BENCH.our_step(model, data, BENCH.CASES[case]["ours"], tmp_path)
    assert max(float(np.abs(theirs[f"weights/{n}"] - weights[n]).max()) for n in weights) > 5e-4  # a step was taken
    for name, difference in BENCH.differences(ours, theirs).items():
        assert difference <= 1e-5, name
