"""Equal to verl 0.9.1 and TRL 1.16.0, against the frozen outputs of `bench/parity.py --freeze` (no peer installed)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from functions.algorithms.names import ADVANTAGES, GIVEN, POLICY_LOSSES

ROOT = Path(__file__).resolve().parents[2]
BATCHES = ("2", "3", "4")


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parity", ROOT / "bench" / "parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", BATCHES)
def test_equals_the_peers(parity: ModuleType, number: str) -> None:
    frozen = dict(np.load(parity.FIXTURE))
    inputs = {key.split("/", 2)[2]: value for key, value in frozen.items() if key.startswith(f"in/{number}/")}
    outputs = {key.removeprefix("out/"): value for key, value in frozen.items() if key.startswith(f"out/{number}|")}
    differences = parity.differences({number: inputs}, outputs)
    assert len(differences) > 150
    assert {case: value for case, value in differences.items() if value > 1e-6} == {}


def test_the_fixtures_cover_every_loss_and_estimator(parity: ModuleType) -> None:
    cases = {key.partition("|")[2] for key in np.load(parity.FIXTURE).files if key.startswith("out/")}
    for name in set(ADVANTAGES) - {"distillation", "gigpo", *GIVEN}:  # gigpo: test_turns.py
        assert any(case.startswith(f"verl/advantage/{name}") for case in cases), name
    for name in ("vanilla", "cispo"):
        for mode in parity.AGGREGATIONS:
            assert f"verl/{name}/{mode}/weighted/gradient" in cases
    for name in set(POLICY_LOSSES) - {"importance_sampling"}:
        assert any(case.startswith((f"verl/{name}/", f"trl/{name}/")) for case in cases), name
    for kind in parity.KL_KINDS:
        assert f"verl/kl/{kind}/gradient" in cases
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo"):
        assert f"trl/{loss_type}/gradient" in cases


def test_peers_fixture_is_small(parity: ModuleType) -> None:
    assert parity.FIXTURE.stat().st_size < 350_000
