"""What can be known of a job before anything runs: the code that it names is there, and takes what it is given.

Nothing of the user's is executed: a file is parsed, not imported.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from functions.base.names import REPLAYED
from functions.call.function import FatalError
from functions.call.train_params import TrainParams
from functions.reward.code import tests_of
from functions.reward.rules import CODE_RULES, RULES
from orchestrator.base.errors import ConfigError, DataError
from orchestrator.job.config import JobConfig
from orchestrator.job.data import Row
from orchestrator.job.environment_config import SCHEMES
from orchestrator.planner.model_shape import text_config


def check_code(job: JobConfig) -> None:
    """Raises ConfigError for a scorer, loss or advantage that is named and is not there."""
    for scorer in job.reward.scorers.values():
        _check_scorer(scorer)
    for kind in job.environment.kinds.values() if job.environment is not None else ():
        if not kind.startswith(SCHEMES):
            check_object("environment.kind", kind)
    for key in ("advantage", "loss"):
        value = job.algorithm.get(key)
        if isinstance(value, str) and ":" in value:
            check_object(f"algorithm.{key}", value)


def check_turns(job: JobConfig, params: TrainParams) -> None:
    """Raises ConfigError for an advantage that wants what only an environment says."""
    if params.advantage == "gigpo" and job.reward.score != "environment":
        raise ConfigError(
            f"algorithm.advantage: 'gigpo' wants rewards of turns, got reward.score = {job.reward.score!r} "
            '(wants "environment")'
        )


def check_replay(job: JobConfig, params: TrainParams) -> None:
    """Raises ConfigError for a replay of choices that no router makes, or that nobody says."""
    if job.train.router_replay == "disabled":
        return
    kind = text_config(Path(job.model.path)).get("model_type")
    if kind not in REPLAYED:
        raise ConfigError(
            f"train.router_replay: the model is of type {kind!r} (wants experts whose routing is known: "
            f"{', '.join(REPLAYED)})"
        )
    if params.given or job.rollout.engine != "transformers":
        got = "a recipe that samples nothing" if params.given else f"{job.rollout.engine!r}"
        raise ConfigError(
            f"train.router_replay: got {got} (wants rollout.engine = 'transformers', which says what its routers chose)"
        )


def check_options(params: TrainParams) -> None:
    """Raises ConfigError for an option that the user's own loss or advantage does not take. Neither is run."""
    for key, name, options in (
        ("advantage", params.advantage, params.advantage_options), ("loss", params.loss, params.loss_options),
    ):  # fmt: skip
        found = check_object(f"algorithm.{key}", name) if ":" in name else None
        if found is None:
            continue
        given = found.args
        if wrong := [*given.posonlyargs, *given.args, *filter(None, (given.vararg, given.kwarg))]:
            names = ", ".join(argument.arg for argument in wrong)
            raise ConfigError(f"algorithm.{key}: {name}: {names} must be keyword-only (put them after `*`)")
        taken = [argument.arg for argument in given.kwonlyargs]
        if unknown := sorted(set(options) - set(taken)):
            lacks = f"{name} has no option {', '.join(unknown)}"
            raise ConfigError(f"algorithm.{key}_options: {lacks}; it takes {', '.join(taken) or 'none'}")


def _check_scorer(score: str) -> None:
    if score in ("model", "environment") or "://" in score:
        return
    kind, colon, name = score.partition(":")
    if kind == "rule" and colon:
        known = [*RULES, *CODE_RULES]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean 'rule:{close[0]}'?" if close else f"rules are {', '.join(known)}"
            raise ConfigError(f"reward.score: there is no rule {name!r}; {hint}")
        return
    if not colon:
        forms = "wants rule:NAME, file.py:function, model or a URL"
        hint = f"did you mean 'rule:{score}'?" if score in RULES else forms
        raise ConfigError(f"reward.score: got {score!r}; {hint}")
    check_object("reward.score", score)


def check_tests(job: JobConfig, rows: Iterable[Row]) -> None:
    """Raises DataError for a row whose tests `rule:code` could not run, by its place in the data. None is run."""
    rule = next((scorer for scorer in job.reward.scorers.values() if scorer.removeprefix("rule:") in CODE_RULES), None)
    for row in rows if rule else ():
        try:
            tests_of(row.to_json(), rule or "")
        except FatalError as error:
            raise DataError(f"{row.where}: {error}") from None


def check_object(key: str, name: str) -> ast.FunctionDef | None:
    """Raises ConfigError where `file.py:name` or `package.module:NAME` is not there.

    The function's definition, where the file has one of this name.
    """
    where, _, attribute = name.rpartition(":")
    if not attribute.isidentifier():
        raise ConfigError(f"{key}: got {name!r}, wants file.py:name or package.module:NAME")
    if not where.endswith(".py"):
        try:
            found = importlib.util.find_spec(where)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise ConfigError(f"{key}: there is no module {where!r} here")
        return None
    try:
        tree = ast.parse(Path(where).read_bytes(), where)
    except OSError as error:
        raise ConfigError(f"{key}: {where} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{key}: {where}{line}: {getattr(error, 'msg', error)}") from None
    names = set(_defined(tree))
    if attribute not in names and "*" not in names and "__getattr__" not in names:
        close = difflib.get_close_matches(attribute, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it defines {', '.join(sorted(names)) or 'nothing'}"
        raise ConfigError(f"{key}: {where} has no {attribute!r}; {hint}")
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == attribute]
    return defined[-1] if defined and not defined[-1].decorator_list else None


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module's own statements bind; "*" where it imports all of another."""
    for node in ast.walk(tree):  # names bound in functions too: better one too many than one too few
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
