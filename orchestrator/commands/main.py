"""The command line. Every failure is one line on standard error and an exit code (orchestrator/base/errors.py).

A command is a module of this room, named by its verb:

    HELP                   one line, for the list of commands; the module's docstring is what `VERB --help` begins with
    EXAMPLE                a whole command, what `VERB --help` ends with
    arguments(parser)      says what it takes
    execute(given) -> int  does it; returns the exit code

Only the module of the command that was given is imported.
"""

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module, metadata

from orchestrator.base.errors import OrchestratorError

COMMANDS = (
    "init", "run", "resume", "status", "cost", "cancel", "fetch", "export", "eval", "plan", "simulate", "serve",
    "submit", "top", "report", "logs", "recipes", "doctor", "serve-model", "chat", "sample", "completion",
)  # fmt: skip
"""In the order of `--help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"rlhf-orchestrate {metadata.version('rlhf-orchestrate')}")
        return 0
    parser = parser_of(words[:1] if words and words[0] in COMMANDS else COMMANDS)
    given, more = parser.parse_known_args(words)
    if not hasattr(given, "overrides") or any(word.startswith("-") for word in more):
        given = parser.parse_args(words)  # says what is wrong
    else:
        given.overrides += more  # overrides may follow options, where argparse does not look for them
    try:
        code: int = given.execute(given)
    except OrchestratorError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # of what only looks on; a job that runs here ends in order (session.train)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def parser_of(verbs: Sequence[str]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="rlhf-orchestrate", description="RLHF where every stage is a function that exists only while it works."
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")
    for verb in verbs:
        module = import_module(f"orchestrator.commands.{verb.replace('-', '_')}")
        command = commands.add_parser(
            verb, help=module.HELP, description=module.__doc__, epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.arguments(command)
        command.set_defaults(execute=module.execute)
    return parser
