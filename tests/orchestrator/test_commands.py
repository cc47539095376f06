"""What holds of every command: its example is one, names of runs are found, tables are JSON too."""

from __future__ import annotations

import inspect
import json
import shlex
from importlib import import_module, metadata
from pathlib import Path

import pytest

from orchestrator.commands.arguments import run_path
from orchestrator.commands.completion import SHELLS
from orchestrator.commands.main import COMMANDS, main, parser_of


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_example_of_each_help_is_taken(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = import_module(f"orchestrator.commands.{verb.replace('-', '_')}").EXAMPLE
    program, *words = shlex.split(example)
    given, more = parser_of([verb]).parse_known_args(words)
    assert program == "rlhf-orchestrate"
    assert words[0] == verb
    assert not [word for word in more if "=" not in word or not hasattr(given, "overrides")]
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert capsys.readouterr().out.rstrip().endswith(f"example:\n  {example}")


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command_and_its_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import shtab  # noqa: F401
    except ModuleNotFoundError:
        assert main(["completion", shell]) == 1
        assert "pip install shtab" in capsys.readouterr().err
        return
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in COMMANDS)
    assert "run-dir" in script


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlhf-orchestrate {metadata.version('rlhf-orchestrate')}\n"


def test_a_name_means_the_run_in_runs_unless_it_is_one_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "run.json").write_text("{}")
    assert run_path("a") == Path("runs/a")
    assert run_path("b") == Path("b"), "what is nowhere is said of what was typed"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text("{}")
    assert run_path("a") == Path("a")


@pytest.mark.parametrize("words", [["recipes"], ["doctor"], ["simulate", "3b-grpo-gpqa", "--steps", "1"]])
def test_tables_as_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([*words, "--json"])
    rows = json.loads(capsys.readouterr().out)
    first = {"recipes": "ppo", "doctor": "python", "simulate": "serverful"}[words[0]]
    assert first in rows[0].values()


def test_every_command_that_prints_a_table_prints_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in COMMANDS:
        source = inspect.getsource(import_module(f"orchestrator.commands.{verb.replace('-', '_')}"))
        if "Table(" in source:
            with pytest.raises(SystemExit):
                main([verb, "--help"])
            assert "--json" in capsys.readouterr().out, verb
