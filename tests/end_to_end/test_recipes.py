"""Every recipe learns: 40 steps of the arithmetic example lift the held-out pass rate by at least 0.15."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.recipes import RECIPES
from tests.support.tiny_job import command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("leaks_nothing")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
PASS = "val-core/arithmetic/reward/mean@1"
COST_LIMIT = 0.15
COST = f'''
import importlib.util
spec = importlib.util.spec_from_file_location("reward", "{EXAMPLE / "reward.py"}")
reward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reward)


def score(data_source, solution_str, ground_truth, extra_info=None):
    """The example's score; and a cost that stands in its way: 1 for a claim of 20 or more, right or wrong."""
    claim = solution_str.split()[-1:]
    return {{
        "score": reward.compute_score(data_source, solution_str, ground_truth, extra_info),
        "cost": float(bool(claim) and claim[0].isdigit() and int(claim[0]) >= 20),
    }}
'''
CRITIC = ["critic.lr=1e-3"]
OVERRIDES = {"ppo": CRITIC, "safe_rlhf": [*CRITIC, f"algorithm.cost.limit={COST_LIMIT}"]}


def train(run: Path, recipe: str, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of 40 steps."""
    done = command(
        "run", EXAMPLE / "job.toml", "--run-dir", run, f"recipe={recipe}", "telemetry.tensorboard=false", *overrides,
        timeout_s=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What GRPO makes of the example's model."""
    run = tmp_path_factory.mktemp("teacher") / "run"
    assert train(run, "grpo")[-1][PASS] >= 0.85
    return run / "model"


def assert_lifted(metrics: list[dict[str, Any]]) -> None:
    first, last = metrics[0][PASS], metrics[-1][PASS]
    print(f"pass rate {first:.3f} -> {last:.3f}")
    assert last - first >= 0.15


ELSEWHERE = ("distillation", "topk_distillation", "safe_rlhf", "gigpo")
"""Below; gigpo in tests/example/test_tools.py."""


@pytest.mark.parametrize("recipe", [name for name, r in RECIPES.items() if name not in ELSEWHERE and not r.given])
def test_a_recipe_learns(recipe: str, tmp_path: Path) -> None:
    assert_lifted(train(tmp_path / "run", recipe, *OVERRIDES.get(recipe, ())))


@pytest.mark.parametrize("recipe", ["distillation", "topk_distillation"])
def test_distillation_learns_from_a_teacher(teacher: Path, tmp_path: Path, recipe: str) -> None:
    assert_lifted(train(tmp_path / "run", recipe, f"reference.path={teacher}"))


def test_safe_rlhf_learns_within_its_cost_limit(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(COST)
    metrics = train(tmp_path / "run", "safe_rlhf", f"reward.score={tmp_path}/reward.py:score", *OVERRIDES["safe_rlhf"])
    assert_lifted(metrics)
    rows = [json.loads(line) for line in (EXAMPLE / "train.jsonl").read_text().splitlines()]
    right = sum(int(row["reward_model"]["ground_truth"]) >= 20 for row in rows) / len(rows)
    assert right > COST_LIMIT, "the limit binds: a policy that is always right would be over it"
    costs = [line["critic/cost/mean"] for line in metrics if "critic/cost/mean" in line]
    print(f"cost {costs[0]:.3f} -> {sum(costs[-5:]) / 5:.3f}, limit {COST_LIMIT}")
    assert sum(costs[-5:]) / 5 < COST_LIMIT
