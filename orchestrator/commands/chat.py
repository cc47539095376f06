"""Talk with a model, or with the policy of a run: a line in, an answer out, until the end of input."""

from argparse import ArgumentParser, Namespace

from orchestrator.commands import serve_model

HELP = "talk with a model or a run's policy"
EXAMPLE = "rlhf-orchestrate chat runs/arithmetic --temperature 0"


def arguments(parser: ArgumentParser) -> None:
    serve_model.model(parser)
    serve_model.sampling(parser)


def execute(given: Namespace) -> int:
    from orchestrator.api.gateway.serve import chat

    chat(serve_model.options(given), serve_model.settings(given))
    return 0
