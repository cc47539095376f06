"""examples/first_hour.ipynb whole, as a kernel runs it: a loop in the thread, the cells' sources in linecache."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

from tests.support.forked import ForkedCommand, run_program
from tests.support.tiny_job import ENV, assert_nothing_left

ROOT = Path(__file__).parents[2]
KERNEL = """
import asyncio, json, linecache, os, sys, types
os.chdir(sys.argv[2])

async def main():
    cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        name, lines = f"/tmp/ipykernel_1/{number}.py", cell["source"]
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        exec(compile("".join(lines), name, "exec"), sys.modules["__main__"].__dict__)

asyncio.run(main())
json.dump({"metrics": metrics, "said": ask([{"role": "user", "content": "1+2=?"}], max_new_tokens=4)}, open("out", "w"))
"""


def test_the_notebook_runs_as_it_is(tmp_path: Path) -> None:
    notebook = ROOT / "examples" / "first_hour.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    assert len(cells) == 10
    assert not any(cell.get("outputs") for cell in cells)
    shutil.copytree(ROOT / "examples" / "arithmetic", tmp_path / "arithmetic")
    validation = tmp_path / "arithmetic" / "validation.jsonl"
    validation.write_text("".join(validation.read_text().splitlines(keepends=True)[:8]))
    text = notebook.read_text()
    for whole, short in (
        ('\\"steps\\": 5', '\\"steps\\": 2'),
        ('\\"n\\": 8', '\\"n\\": 4'),
    ):  # as long as a test may take
        assert whole in text
        text = text.replace(whole, short)
    (tmp_path / "notebook.ipynb").write_text(text)
    kernel = ForkedCommand(run_program, [KERNEL, "notebook.ipynb", str(tmp_path)], ENV)
    shown, errors = kernel.communicate(timeout=280)
    assert kernel.returncode == 0, errors
    assert_nothing_left()
    assert "step 2" in shown
    assert "validation 0" in shown
    out = json.loads((tmp_path / "out").read_text())
    assert [row["step"] for row in out["metrics"]] == [0, 1, 2]
    assert out["said"][0]["generated_text"][-1]["role"] == "assistant"
    first, second = (tomllib.loads((tmp_path / "runs" / n / "job.toml").read_text()) for n in ("notebook", "unsolved"))
    assert first["reward"]["score"] == second["reward"]["score"].replace("/unsolved/", "/notebook/")
    assert second["recipe"].startswith(str(tmp_path / "runs" / "unsolved" / "code"))
    assert (
        Path(second["recipe"].partition(":")[0]).read_text().startswith("from orchestrator.recipes.base import recipe")
    )
    assert (second["name"], second["steps"]) == ("unsolved", 2)
