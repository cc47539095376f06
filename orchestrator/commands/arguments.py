"""Arguments that several commands take."""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

RUNS = Path("runs")
"""Where runs are, unless said otherwise."""


def job_file(parser: ArgumentParser) -> None:
    """`job` and `overrides`."""
    parser.add_argument("job", type=Path, help="job file (TOML)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings over those of the file")


def run_directory(parser: ArgumentParser) -> None:
    """`run`."""
    parser.add_argument("run", type=run_path, help="run directory, or the name of one in runs/")


def run_path(text: str) -> Path:
    """The directory of a run by its path, else by its name in runs/."""
    path, named = Path(text), RUNS / text
    return named if not (path / "run.json").exists() and (named / "run.json").exists() else path


def json_output(parser: ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def print_json(value: Any) -> None:
    """For programs: figures as they are, not rounded."""
    print(json.dumps(value, indent=2))


def server(parser: ArgumentParser) -> None:
    """`--url` and `--token-file`."""
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (default: http://127.0.0.1:8080)")
    parser.add_argument(
        "--token-file", type=Path, help="file that holds the token (default: $RLHF_TOKEN, or runs/.token)"
    )
