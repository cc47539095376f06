"""Prints what makes a shell complete commands and options. For bash, in ~/.bashrc:

    eval "$(rlhf-orchestrate completion bash)"

For zsh a file of that in $fpath, named _rlhf-orchestrate. The package shtab makes it, from the commands as they are.
"""

from argparse import ArgumentParser, Namespace

from orchestrator.base.errors import RunError

HELP = "completion for bash, zsh or tcsh"
EXAMPLE = "rlhf-orchestrate completion bash"
SHELLS = ("bash", "zsh", "tcsh")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def execute(given: Namespace) -> int:
    from orchestrator.commands.main import COMMANDS, parser_of  # it imports this module

    try:
        import shtab
    except ModuleNotFoundError:
        raise RunError("completion: the package shtab is not installed; pip install shtab") from None
    print(shtab.complete(parser_of(COMMANDS), shell=given.shell))
    return 0
