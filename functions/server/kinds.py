"""Which Function object a replica runs, by the name of its kind."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

from functions.base.suggest import did_you_mean
from functions.call import userfile
from functions.call.function import FatalError, Function

KINDS: Mapping[str, str] = {
    "generate": "functions.generate.function:GenerateFunction",
    "environment": "functions.environment.function:EnvironmentFunction",
    "reward": "functions.reward.function:RewardFunction",
    "reference": "functions.reference.function:ReferenceFunction",
    "train": "functions.train.function:TrainFunction",
}


def load(kind: str) -> Any:
    """The class of `kind`: one of KINDS, or a user's own, named `path/to/file.py:Class` or `package.module:Class`.

    Its module is imported now and not before: a reward replica imports no torch unless its scorer needs it.
    """
    if kind not in KINDS and ":" not in kind:
        raise FatalError(f"unknown function kind {kind!r}{did_you_mean(kind, KINDS)}; kinds: {', '.join(KINDS)}")
    return userfile.load(KINDS.get(kind, kind))


def build(kind: str, options: Mapping[str, Any]) -> Function:
    """A Function object; `options` are the keyword arguments of its class.

    Raises FatalError for an unknown kind, an unknown or missing option, and for a value that the class refuses
    (ValueError, TypeError), naming it.
    """
    function = load(kind)
    known = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise FatalError(
                f"function kind {kind!r} has no option {name!r}{did_you_mean(name, known)}; options: {listed}"
            )
    try:
        return cast(Function, function(**options))
    except (TypeError, ValueError) as error:
        raise FatalError(f"options of function kind {kind!r}: {error}") from error
