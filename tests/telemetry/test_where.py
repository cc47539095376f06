"""Where a step's time went: hand-made traces whose parts are known, and that they always add up to the step's time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from functions.train.measured import sequence_lengths
from orchestrator.job.config import parse_job
from orchestrator.planner.base import CallObservation
from orchestrator.telemetry.utilization import Utilization
from orchestrator.telemetry.where import COLD, PARTS, UNEVEN, advice, parts_of, where_time_went
from tests.support.tiny_job import make_model

Phase = tuple[str, float, float]


def call(
    function: str, replica: str, begun_s: float, stop_s: float, *phases: Phase, start_s: float = 0.0, cold: bool = False
) -> CallObservation:
    operation = {"generate": "generate", "reward": "score", "train": "train"}[function]
    return CallObservation(
        function, replica, operation, cold, start_s, stop_s - begun_s, 0, 0, 0, stop_s, {}, list(phases)
    )


def parts(start_s: float, stop_s: float, *calls: CallObservation) -> dict[str, float]:
    found = parts_of(where_time_went(start_s, stop_s, calls))
    return {part: round(seconds, 6) for part, seconds in found.items() if seconds}


STEP = (
    call("generate", "g0", 102, 108, ("load", 102, 103), ("read", 103, 103.5), ("generate", 103.5, 108),
         start_s=2, cold=True),
    call("reward", "r0", 107, 109, ("score", 107, 109)),
    call("train", "t0", 110, 116, ("fetch", 110, 111), ("train", 111, 115), ("publish", 115, 116), start_s=1),
)  # fmt: skip
"""From 100 to 117: one stage after the other, scoring beside generation for a second."""


def test_one_stage_after_the_other() -> None:
    assert parts(100, 117, *STEP) == {
        "starting": 3, "loading": 2, "reading": 0.5, "generating": 4.5, "scoring": 1, "training": 4, "publishing": 1,
        "idle": 1,
    }  # fmt: skip
    waited = parts_of(where_time_went(90, 117, STEP, 91))
    assert (waited["starting"], waited["idle"]) == (3 + 9, 1 + 1)  # its libraries were imported since 91
    assert where_time_went(90, 117, STEP, 91)[COLD] == where_time_went(100, 117, STEP)[COLD] == 3, (
        "the train function was there: its wait was none for a start"
    )


def test_a_tail_is_when_at_most_half_of_the_replicas_make_samples() -> None:
    calls = [call("generate", f"g{k}", 0, stop_s) for k, stop_s in enumerate((4, 4, 6, 10))]
    assert parts(0, 10, *calls) == {"generating": 4, "tail": 6}
    assert where_time_went(0, 10, calls)[UNEVEN] == pytest.approx(2 * 0.5 + 4 * 0.75)
    late = [call("generate", "g0", 0, 10), call("generate", "g1", 3, 10)]
    assert parts(0, 10, *late) == {"generating": 10}, "until the others have started it is no tail"
    assert parts(0, 10, call("generate", "g0", 0, 10)) == {"generating": 10}, "one alone has none"


def test_the_innermost_phase_says_what_is_done() -> None:
    inner = call("generate", "g0", 0, 4, ("generate", 0, 4), ("publish", 1, 2))
    assert parts(0, 4, inner) == {"generating": 3, "publishing": 1}


def test_what_lies_outside_of_the_step_does_not_count() -> None:
    assert parts(5, 8, call("train", "t0", 0, 6), call("generate", "g0", 7, 20)) == {
        "training": 1, "idle": 1, "generating": 1,
    }  # fmt: skip
    assert parts(0, 3) == {"idle": 3}


TIMES = st.floats(-5, 25).map(lambda x: round(x, 2))
CALLS = st.builds(
    lambda function, number, begun_s, took_s, waited_s, name: call(
        function, f"{function}-{number}", begun_s, begun_s + took_s, (name, begun_s, begun_s + took_s / 2),
        start_s=waited_s, cold=number == 0,
    ),
    st.sampled_from(["generate", "reward", "train"]), st.integers(0, 3), TIMES, st.floats(0, 9), st.floats(0, 3),
    st.sampled_from(["load", "read", "generate", "score", "train", "publish", "of another version"]),
)  # fmt: skip


@given(st.lists(CALLS, max_size=12), st.floats(0.01, 20))
def test_parts_add_up_to_the_step_whatever_happens(calls: list[CallObservation], step_s: float) -> None:
    found = where_time_went(1.0, 1.0 + step_s, calls)
    assert set(parts_of(found)) == set(PARTS)
    assert sum(parts_of(found).values()) == pytest.approx(step_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in found.values())
    assert found[COLD] <= found["step_time_s/starting"] + found["step_time_s/loading"] + 1e-9
    assert found[UNEVEN] <= found["step_time_s/tail"] + 1e-9


def test_utilization_is_the_models_arithmetic_over_the_devices_peak(tmp_path: Path) -> None:
    """6 FLOP a parameter and token; two ranks of two H100 for half a second (989.5 TFLOP/s each)."""
    make_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    table = {"name": "a", "steps": 1, "model": {"path": "model", "dtype": "bfloat16"}, "data": {"train": "train.jsonl"}}
    calls = [
        replace(call("train", f"t{k}", 0, 2, ("load", 0, 1), ("train", 1, 1.5)), stats={"tokens": 5e6})
        for k in range(2)
    ]
    weights = sum(p.numel() for p in LlamaForCausalLM.from_pretrained(tmp_path / "model").parameters())
    job = parse_job(table | {"planner": {"gpu": "H100"}, "functions": {"generate": {"gpus": 1}}}, base=tmp_path)
    found = Utilization(job, {"train": 2}).of(calls)
    assert found == {"perf/mfu/actor": pytest.approx(6 * weights * 5e6 / (0.5 * 4 * 989.5e12))}
    assert Utilization(job, {"train": 0}).of(calls) == {}, "no GPUs"
    assert Utilization(parse_job(table, base=tmp_path), {"train": 2}).of(calls) == {}, "no peak is known"


def test_ranks_tokens_as_they_were_dealt_and_as_they_would_lie_in_order() -> None:
    found = sequence_lengths([1, 2, 3, 10], [9, 7])
    assert {name.removeprefix("global_seqlen/"): value for name, value in found.items()} == {
        "min": 3, "max": 13, "minmax_diff": 10, "mean": 8, "balanced_min": 7, "balanced_max": 9,
    }  # fmt: skip


def test_advice_says_what_would_be_saved_and_what_costs_nothing_comes_first() -> None:
    found = where_time_went(100, 117, STEP)
    assert advice(found, policy="static", warm=False) == (
        "29 % of this step was starting and loading; planner.keep_warm would save about 3 s"
    )
    assert "planner.objective" in advice(found, policy="adaptive", warm=False)
    assert advice(found, policy="static", warm=True) == (
        "26 % of this step was generating; twice the replicas (functions.generate.replicas) would save at most 2.2 s"
    )
    tail = where_time_went(0, 10, [call("generate", f"g{k}", 0, stop_s) for k, stop_s in enumerate((4, 4, 6, 10))])
    assert advice(tail, policy="static", warm=True).startswith("60 % of this step was waiting for the tail; samples")
    assert advice(where_time_went(0, 10, []), policy="static", warm=False) == "", "nothing to say of an idle step"
    assert advice({"timing_s/step": 3.0}, policy="static", warm=False) == "", "of a step that does not tell"
