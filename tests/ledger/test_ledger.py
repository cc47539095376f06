"""The books: hand-made lives of replicas, resumes and kills, and that nothing is ever lost or counted twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.base.errors import RunError
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.run.ledger import Cost, Ledger, costs_of, read_books, total

GENERATE = FunctionSpec("generate", "generate", max_replicas=3, gpus=1, usd_per_hour=3.6)
REWARD = FunctionSpec("reward", "reward", max_replicas=1, usd_per_hour=0.36)
SPECS = [GENERATE, REWARD]


def cost(*values: float) -> object:
    """A Cost equal to within rounding."""
    return pytest.approx(values)


def values(found: Cost) -> tuple[float, ...]:
    return dataclasses.astuple(found)


def test_a_hand_made_case() -> None:
    usage = [
        Usage("generate", "generate-0", 10.0, 40.0, 20.0),
        Usage("generate", "generate-1", 15.0, None, 5.0, parked_s=7.0),
        Usage("reward", "reward-0", 20.0, 30.0, 10.0),
    ]
    costs = costs_of(usage, SPECS, now_s=65.0)
    assert values(costs["generate"]) == cost(80.0, 25.0, 80.0, 0.08, 2, 7.0)
    assert values(costs["reward"]) == cost(10.0, 10.0, 0.0, 0.001, 1, 0.0)
    assert total(costs).usd == pytest.approx(0.081)
    assert costs_of([], SPECS, 65.0) == {"generate": Cost(), "reward": Cost()}


def test_steps_add_up_to_the_job(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "cost.json", SPECS, next_step=0, now_s=100.0)
    one = Usage("generate", "g0", 100.0, None, 5.0)
    first = ledger.close_step(0, [one], 110.0)
    assert (first.step, first.wall_s) == (0, 10.0)
    assert values(first.functions["generate"]) == cost(10.0, 5.0, 10.0, 0.01, 1, 0.0)
    ended = [Usage("generate", "g0", 100.0, 112.0, 6.0), Usage("reward", "r0", 112.0, None, 1.0)]
    second = ledger.close_step(1, ended, 120.0)
    assert second.functions["generate"].replica_s == pytest.approx(2.0)
    assert second.functions["generate"].starts == 0
    assert values(second.functions["reward"]) == cost(8.0, 1.0, 0.0, 0.0008, 1, 0.0)
    books = ledger.update([ended[0], Usage("reward", "r0", 112.0, 121.0, 1.0)], 121.0)
    assert books.functions["generate"].replica_s == pytest.approx(12.0)
    assert books.functions["reward"].replica_s == pytest.approx(9.0)
    assert books.open.step == 2
    assert [books.wall_s, ledger.wall_s(125.0)] == pytest.approx([21.0, 25.0])
    written = json.loads((tmp_path / "cost.json").read_text())
    assert written["usd"] == pytest.approx(books.usd) == pytest.approx(0.012 + 0.0009)
    assert [step["usd"] for step in written["steps"]] == [first.usd, second.usd]


def test_a_killed_execution_is_paid_for_in_the_step_that_it_did_not_commit(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    ledger = Ledger(path, SPECS, next_step=0, now_s=0.0)
    ledger.close_step(0, [Usage("generate", "g0", 0.0, 5.0, 5.0)], 10.0)
    ledger.update([Usage("generate", "g0", 0.0, 5.0, 5.0), Usage("generate", "g1", 10.0, None, 0.0)], 14.0)
    # killed here; a new event loop's clock starts anywhere
    ledger = Ledger(path, SPECS, next_step=1, now_s=1000.0)
    assert ledger.books.functions["generate"].replica_s == pytest.approx(9.0)
    step = ledger.close_step(1, [Usage("generate", "g0", 1000.0, 1003.0, 3.0)], 1004.0)
    assert values(step.functions["generate"]) == cost(7.0, 3.0, 7.0, 0.007, 2, 0.0)
    assert step.wall_s == pytest.approx(8.0)
    books = read_books(path)
    assert books is not None
    assert [books.executions, books.wall_s] == pytest.approx([2, 18.0])
    assert [s.step for s in books.steps] == [0, 1]


def test_a_kill_between_the_journals_commit_and_the_books(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    Ledger(path, SPECS, next_step=0, now_s=0.0).update([Usage("reward", "r0", 0.0, 4.0, 4.0)], 5.0)
    ledger = Ledger(path, SPECS, next_step=1, now_s=50.0)  # the journal has step 0
    assert [(s.step, s.wall_s) for s in ledger.books.steps] == [(0, 5.0)]
    ledger.close_step(1, [Usage("reward", "r0", 50.0, 51.0, 1.0)], 52.0)
    assert [s.functions["reward"].replica_s for s in ledger.books.steps] == [4.0, 1.0]


@settings(max_examples=30)
@given(
    lives=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.sampled_from(SPECS)), max_size=12),
    commits=st.lists(st.floats(0.1, 30), max_size=6),
    kills=st.sets(st.integers(0, 6)),
)
def test_however_it_is_cut_the_sum_is_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    lives: list[tuple[float, float, FunctionSpec]],
    commits: list[float],
    kills: set[int],
) -> None:
    """Steps of any lengths; an execution after a kill sees only replicas of its own."""
    path = tmp_path_factory.mktemp("books") / "cost.json"
    ledger, now, began = Ledger(path, SPECS, next_step=0, now_s=0.0), 0.0, 0.0

    def usage() -> list[Usage]:
        seen = [life for life in lives if began <= life[0] <= now]
        return [
            Usage(spec.name, str(i), start, start + took if start + took <= now else None, 0.0)
            for i, (start, took, spec) in enumerate(seen)
        ]

    expected = 0.0
    for step, took in enumerate(commits):
        now += took
        if step in kills:
            ledger.update(usage(), now)
            expected += total(costs_of(usage(), SPECS, now)).replica_s
            ledger, began = Ledger(path, SPECS, next_step=step, now_s=now), now + 1e-9
        ledger.close_step(step, usage(), now)
    expected += total(costs_of(usage(), SPECS, now)).replica_s
    books = ledger.update(usage(), now)
    assert total(books.functions).replica_s == pytest.approx(expected)
    assert books.wall_s == pytest.approx(sum(commits))
    assert read_books(path) == books
    assert [s.step for s in books.steps] == list(range(len(commits)))


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "not a cost file"), ("[]", "not a cost file"), ('{"format": 9}', "another version"), ("{}", "not a cost")],
)
def test_a_file_that_holds_no_books_is_not_written_over(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(RunError, match=says):
        Ledger(path, SPECS, next_step=0, now_s=0.0)
    assert path.read_text() == content
