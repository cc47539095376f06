"""Arguments that several commands take."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def job_file(parser: ArgumentParser) -> None:
    """`job` and `overrides`."""
    parser.add_argument("job", type=Path, help="job file (TOML)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings over those of the file")


def run_directory(parser: ArgumentParser) -> None:
    """`run`."""
    parser.add_argument("run", type=Path, help="run directory")


def server(parser: ArgumentParser) -> None:
    """`--url` and `--token-file`."""
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (default: http://127.0.0.1:8080)")
    parser.add_argument(
        "--token-file", type=Path, help="file that holds the token (default: $RLHF_TOKEN, or runs/.token)"
    )
