"""A model, or the policy of a run, behind OpenAI's API: /v1/chat/completions, /v1/completions, /inference/v1/generate.

Replicas are started when somebody asks and are gone when nobody does. On loopback a token is made and printed.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from orchestrator.commands.arguments import run_path

HELP = "serve a model or a run's policy over OpenAI's API"
EXAMPLE = "rlhf-orchestrate serve-model runs/arithmetic"


def arguments(parser: ArgumentParser) -> None:
    model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--tokens", type=Path, help="file of lines `name read|write token` (default: one made here)")
    parser.add_argument("--name", help="the model's name to clients (default: the directory's)")


def model(parser: ArgumentParser) -> None:
    """What `chat` and `sample` take too."""
    parser.add_argument("model", help="a Hugging Face directory, an id of the Hub, or a run (directory or name)")
    parser.add_argument("--replicas", type=int, default=1, help="replicas at most (default: 1)")
    parser.add_argument("--slots", type=int, help="samples that a replica decodes at a time (default: 64)")
    parser.add_argument("--engine", choices=("auto", "torch", "transformers", "vllm"), help="default: auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32, or the run's")
    parser.add_argument("--idle-s", type=float, default=60.0, help="replicas go after so long without work (60)")


def sampling(parser: ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, help="of a response")
    parser.add_argument("--temperature", type=float, help="default: 1; 0 is greedy")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, help="the same responses again")


def options(given: Namespace) -> Any:
    from orchestrator.api.gateway.start import Options

    return Options(
        str(run_path(given.model)), getattr(given, "name", None), given.replicas, given.slots, given.engine,
        given.dtype, given.idle_s,
    )  # fmt: skip


def settings(given: Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def execute(given: Namespace) -> int:
    from orchestrator.api.gateway.serve import serve  # `--help` need not wait for FastAPI

    serve(options(given), host=given.host, port=given.port, tokens=given.tokens)
    return 0
