"""Responses to the prompts of a JSONL file (`prompt`: text or messages), by a model or the policy of a run."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestrator.base.errors import DataError, RunError
from orchestrator.commands import serve_model

HELP = "responses to the prompts of a file, as JSONL"
EXAMPLE = "rlhf-orchestrate sample runs/arithmetic validation.jsonl responses.jsonl --n 4"


def arguments(parser: ArgumentParser) -> None:
    serve_model.model(parser)
    parser.add_argument("prompts", type=Path, help="JSONL")
    parser.add_argument("out", type=Path, help="new JSONL file: each row with its `responses`")
    parser.add_argument("--n", type=int, default=1, help="responses to each prompt (default: 1)")
    serve_model.sampling(parser)


def execute(given: Namespace) -> int:
    from orchestrator.api.gateway.serve import sample

    if not given.prompts.is_file():
        raise DataError(f"{given.prompts}: no such file")
    if given.out.exists():
        raise RunError(f"{given.out}: is there already; name a new file")
    count = sample(serve_model.options(given), given.prompts, given.out, {"n": given.n, **serve_model.settings(given)})
    print(f"{given.out}: responses to {count} prompts")
    return 0
