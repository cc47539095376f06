"""Directories of orchestrators that were killed are removed by the next; those of the living stay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from orchestrator.platforms.scratch import Scratch

OWNER = """
import sys
from pathlib import Path
from orchestrator.platforms.scratch import Scratch
path = Scratch(Path(sys.argv[1])).path
(path / "count-0").mkdir()
(path / "count-0" / "model").write_bytes(b"weights")
print(path, flush=True)
sys.stdin.read()
"""


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", OWNER, str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_owner_leaves_is_swept_by_the_next(tmp_path: Path) -> None:
    foreign, alike = tmp_path / "rlhf-userfiles", tmp_path / "rlhf-datasets"  # named as ours are, by somebody else
    for directory in (foreign, alike):
        directory.mkdir()
        (directory / "precious").write_text("")
    (tmp_path / "rlhf-notadir").write_text("")
    killed, left = owner(tmp_path)
    living, kept = owner(tmp_path)
    with killed, living:
        assert left.name.startswith("rlhf-")
        killed.kill()
        killed.wait()
        mine = Scratch(tmp_path)
        assert set(tmp_path.iterdir()) == {foreign, alike, tmp_path / "rlhf-notadir", kept, mine.path}
        assert (kept / "count-0" / "model").exists()
        assert (alike / "precious").exists()
        mine.remove()
        assert not mine.path.exists()
        living.kill()
