from __future__ import annotations

from orchestrator.telemetry.metrics import distribution, length_metrics


def test_names_and_values() -> None:
    assert distribution("critic/score", [1.0, 0.0, 0.5]) == {
        "critic/score/mean": 0.5, "critic/score/max": 1.0, "critic/score/min": 0.0,
    }  # fmt: skip
    assert length_metrics("response_length", [3, 8, 8, 1], 8) == {
        "response_length/mean": 5.0, "response_length/max": 8.0, "response_length/min": 1.0,
        "response_length/clip_ratio": 0.5,
    }  # fmt: skip
    assert distribution("x", []) == length_metrics("x", [], 8) == {}
