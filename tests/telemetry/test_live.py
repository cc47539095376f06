"""The live view on a recorded terminal, and the quiet lines elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from orchestrator.session.terminal_view import (
    LineView,
    LiveView,
    dollars,
    duration,
    line,
    open_view,
    render,
    sparkline,
)
from orchestrator.session.view import Snapshot, View, later, time_left_s

SNAPSHOT = Snapshot(
    job="arithmetic", recipe="grpo", step=17, steps=60, elapsed_s=41.4, stages=("generate", "reward"),
    replicas={"generate": (2, 4), "reward": (1, 1), "train": (0, 1), "big": (20, 160)},
    headlines=[0.3, 0.5, 0.81], validations=[0.34, 0.87], validation_name="val-core/arithmetic/acc/mean@1",
    tokens_per_s=5210.4, cost_usd=0.00421, left_s=104.0, note="call retried: [red]lost[/red]",
)  # fmt: skip


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, legacy_windows=False, record=True)


def drawn(snapshot: Snapshot, width: int = 120) -> str:
    console = terminal(width)
    console.print(render(snapshot))
    return console.export_text()


def test_the_view_shows_what_there_is_to_know() -> None:
    text = drawn(SNAPSHOT)
    for part in (
        "arithmetic", "grpo", "step 17/60", "0:41 gone, 1:44 left", "generate ▸ reward", "generate ■■□□", "reward ■",
        "train ·", "big 20/160", "0.810  ▁▄█", "0.870  ▁█  val-core/arithmetic/acc/mean@1", "5,210",
        "$0.0042", "call retried: [red]lost[/red]",
    ):  # fmt: skip
        assert part in text, part


def test_before_the_first_step_nothing_is_made_up() -> None:
    text = drawn(Snapshot(job="j", recipe="grpo", step=0, steps=3, elapsed_s=0.0, replicas={"train": (0, 1)}))
    assert "nothing runs" in text
    assert "loss" in drawn(replace(SNAPSHOT, headline="loss")), "a job that nothing scores"
    assert "left" not in text
    assert "validation" not in text
    assert "0 replica-seconds" in text, "no dollars where nothing has a price"


def test_a_narrow_terminal_loses_the_ends_of_lines_not_the_lines() -> None:
    rows = drawn(SNAPSHOT, width=60).splitlines()
    assert all(len(row.rstrip()) <= 60 for row in rows)
    assert any(row.startswith("cost") and "$0.0042" in row for row in rows)


def test_the_live_view_ends_with_the_last_state() -> None:
    console = terminal()
    view = LiveView(console)
    view.changed(SNAPSHOT)
    view.committed(Snapshot(job="arithmetic", recipe="grpo", step=60, steps=60, elapsed_s=99.0))
    view.close()
    assert "step 60/60" in console.export_text()
    assert "step 17/60" not in console.export_text().split("step 60/60")[-1]


def test_one_quiet_line_per_step() -> None:
    console = Console(file=io.StringIO(), width=40)
    view = LineView(console)
    view.changed(SNAPSHOT)
    view.changed(SNAPSHOT)
    view.committed(SNAPSHOT)
    view.close()
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == ["call retried: [red]lost[/red]", line(SNAPSHOT)]
    assert line(SNAPSHOT) == (
        "step 17/60  reward 0.810  val-core/arithmetic/acc/mean@1 0.870  5,210 tok/s  $0.0042  0:41 gone  1:44 left"
    )


def test_the_view_fits_where_it_is_shown() -> None:
    assert type(open_view(Console(file=io.StringIO()))) is View, "the log says it"
    dumb = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(open_view(dumb), LineView)
    view = open_view(terminal())
    view.close()
    assert isinstance(view, LiveView)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [([0.0, 1.0], "▁█"), ([0.5, 0.5, 0.5], "▁▁▁"), ([3.0], "▁"), (list(range(8)), "▁▂▃▄▅▆▇█"), ([-1, 0, 1], "▁▅█")],
)
def test_sparkline(values: list[float], blocks: str) -> None:
    assert sparkline(values) == blocks


def test_sparkline_keeps_the_last_values() -> None:
    assert sparkline([100.0, *range(8)], width=8) == "▁▂▃▄▅▆▇█"


def test_the_clock_goes_on_between_snapshots() -> None:
    assert (later(SNAPSHOT, 10.0).elapsed_s, later(SNAPSHOT, 10.0).left_s) == (51.4, 94.0)
    assert later(SNAPSHOT, 1000.0).left_s == 0.0


def test_units() -> None:
    assert [duration(s) for s in (0, 41.4, 59.6, 725, 11220)] == ["0:00", "0:41", "1:00", "12:05", "3:07:00"]
    assert [dollars(v) for v in (0, 0.00421, 1.5, 12345.678)] == ["$0.0000", "$0.0042", "$1.50", "$12,345.68"]
    assert time_left_s(0, 9, []) is None
    assert time_left_s(4, 10, [50.0, 1.0, 1.0, 2.0]) == 12.0, "the median, so that a slow first step does not count"
