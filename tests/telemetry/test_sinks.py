"""metrics.jsonl and TensorBoard files after kills at any moment."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tensorboardX.proto import event_pb2  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from orchestrator.base.errors import RunError
from orchestrator.telemetry.sinks import Committed, JsonLines
from orchestrator.telemetry.tensorboard import TensorBoard

STEPS: Committed = [(step, {"reward": step / 10, "actor/lr": 1e-3}) for step in range(4)]


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, [])
    for step, metrics in STEPS:
        sink.write(step, metrics)
        assert lines(path)[-1] == {"step": step, **metrics}
    sink.close(failed=False)
    assert path.read_text().splitlines()[0] == '{"step": 0, "actor/lr": 0.001, "reward": 0.0}'


@pytest.mark.parametrize("left", ["", '{"step": 0, "actor/lr": 0.0', "garbage\n" * 9])
def test_opened_again_it_is_what_the_journal_says(tmp_path: Path, left: str) -> None:
    """Whatever a killed execution left: lines missing, half a line, lines of steps that were never committed."""
    whole, path = tmp_path / "whole.jsonl", tmp_path / "metrics.jsonl"
    JsonLines(whole, STEPS).close(failed=False)
    path.write_text(left)
    sink = JsonLines(path, STEPS[:2])
    for step, metrics in STEPS[2:]:
        sink.write(step, metrics)
    sink.close(failed=False)
    assert path.read_bytes() == whole.read_bytes()


def test_a_number_without_json_form_is_refused(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", [])
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write(0, {"reward": float("nan")})
    sink.close(failed=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full on this machine")
    sink = JsonLines(tmp_path / "metrics.jsonl", [])
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, sink._lines._file)
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written: No space left on device"):
        sink.write(0, {})
    sink.close(failed=False)
    os.close(full)


def scalars(directory: Path) -> dict[str, dict[int, list[float]]]:
    """TensorBoard's reading: events at or after a later file's session start with that step are purged.

    Parsed by tensorboardX's protobuf classes; checksums by its own crc32c.
    """
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        assert event_pb2.Event.FromString(data[12 : 12 + data[0]]).file_version == "brain.Event:2"
        while data:
            size = int.from_bytes(data[:8], "little")
            for start, stop in ((0, 8), (12, 12 + size)):
                assert data[stop : stop + 4] == struct.pack("<I", masked_crc32c(data[start:stop]))
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.session_log.status == event_pb2.SessionLog.START:
                for values in found.values():
                    for step in [s for s in values if s >= event.step]:
                        del values[step]
            for value in event.summary.value:
                found[value.tag][event.step].append(value.simple_value)
    return {tag: dict(values) for tag, values in found.items()}


def test_tensorboard_after_a_resume_has_every_step_once(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, [])
    for step, metrics in STEPS[:2]:
        first.write(step, metrics)
    first.close(failed=False)
    # the execution before was killed after it had committed step 2, before it wrote it down
    second = TensorBoard(tmp_path, STEPS[:3])
    second.write(*STEPS[3])
    second.close(failed=False)
    found = scalars(tmp_path)
    assert {step: [round(v, 6) for v in values] for step, values in found["reward"].items()} == {
        0: [0.0], 1: [0.1], 2: [0.2], 3: [0.3],
    }  # fmt: skip


def test_a_line_is_there_when_write_returns_though_the_process_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib; from orchestrator.telemetry.sinks import JsonLines; "
        "from orchestrator.telemetry.tensorboard import TensorBoard\n"
        f"path = pathlib.Path({str(tmp_path)!r})\n"
        "for sink in (JsonLines(path / 'm.jsonl', []), TensorBoard(path / 'tb', [])):\n"
        "    sink.write(0, {'reward': 0.5})\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert lines(tmp_path / "m.jsonl") == [{"step": 0, "reward": 0.5}]
    assert scalars(tmp_path / "tb")["reward"] == {0: [0.5]}
