"""Scorers in Python: the rules, and functions from the user's file in verl's or TRL's form.

verl   compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number | {"score": number, ...}
       one sample a call
TRL    reward(prompts, completions, **columns) -> [number, ...]
       all samples of a batch a call; columns are those of the data set's rows; where the prompt is a list of
       messages, a completion is one too: [{"role": "assistant", "content": ...}]
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from functions.call import userfile
from functions.call.function import FatalError
from functions.reward.rules import NEEDS_NO_TRUTH, RULES, predicted
from functions.reward.scorer import Failed, Item, Scored, checked, ground_truth
from functions.reward.timelimit import TimeLimit, time_limit
from functions.sandbox.program import SandboxError

SANDBOX = "sandbox"


@dataclass(frozen=True)
class OneByOne:
    """Calls `function` for each sample. `tick` is called between samples, and may raise."""

    who: str
    function: Callable[[Item], Any]
    timeout_s: float
    tick: Callable[[], None]

    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        results: list[Scored | Failed] = []
        for item in items:
            self.tick()
            results += _guarded(self.who, partial(self.function, item), [item], self.timeout_s)
        return results


@dataclass(frozen=True)
class Batched:
    """Calls `function` with all samples at once. When that fails, with each alone, to find the one that it fails on."""

    who: str
    function: Callable[[Sequence[Item]], Any]
    timeout_s: float
    tick: Callable[[], None]

    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        self.tick()
        results = self._batch(items)
        if len(items) == 1 or not isinstance(results[0], Failed) or any(isinstance(r, Scored) for r in results):
            return results
        alone: list[Scored | Failed] = []
        for item in items:
            self.tick()
            alone += self._batch([item])
        return alone if any(isinstance(result, Failed) for result in alone) else results

    def _batch(self, items: Sequence[Item]) -> list[Scored | Failed]:
        return _guarded(self.who, lambda: self.function(items), items, self.timeout_s * len(items), batch=True)


def _guarded(
    who: str, function: Callable[[], Any], items: Sequence[Item], timeout_s: float, *, batch: bool = False
) -> list[Scored | Failed]:
    """Runs a scorer's function on `items`; whatever goes wrong becomes a Failed for each of them."""
    names = items[0].name if len(items) == 1 else f"{items[0].name} to {items[-1].name}"
    try:
        with time_limit(timeout_s):
            value = function()
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
    except FatalError:
        raise
    except SandboxError as error:
        return [Failed(f"{who}: {names}: {error}", retryable=True)] * len(items)
    except TimeLimit:
        return [Failed(f"{who} took longer than {timeout_s:g} s on {names}")] * len(items)
    except Exception as error:
        return [Failed(f"{who} raised on {names}: {userfile.describe(error)}")] * len(items)
    if not batch:
        return [checked(value, who, items[0])]
    try:
        values = list(value)
    except TypeError:
        return [Failed(f"{who} returned {type(value).__name__} for {names}; wants a list of numbers")] * len(items)
    if len(values) != len(items):
        message = f"{who} returned {len(values)} scores for {len(items)} samples, {names}"
        return [Failed(message)] * len(items)
    return [checked(value, who, item) for value, item in zip(values, items, strict=True)]


def rule(name: str, timeout_s: float, tick: Callable[[], None]) -> OneByOne:
    if name not in RULES:
        raise FatalError(f"unknown rule {name!r}; rules: {', '.join(RULES)}")
    function = RULES[name]

    def score(item: Item) -> dict[str, Any]:
        truth = "" if name in NEEDS_NO_TRUTH else str(ground_truth(item.row))
        pred = predicted(name, item.response)
        return {"score": float(function(item.response, truth)), **({} if pred is None else {"pred": pred})}

    return OneByOne(f"rule:{name}", score, timeout_s, tick)


def from_file(
    name: str, timeout_s: float, tick: Callable[[], None], given: Mapping[str, Any] | None = None
) -> OneByOne | Batched:
    """The scorer `path/to/file.py:function`. FatalError when it has neither verl's nor TRL's form. Of what is `given`
    besides ("sandbox") it gets what it has a parameter for."""
    function = userfile.load(name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise FatalError(f"{name} is {type(function).__name__}, wants a function") from error
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    wanted = {key: value for key, value in (given or {}).items() if key in parameters}
    if SANDBOX in parameters and not wanted and parameters[SANDBOX].default is inspect.Parameter.empty:
        raise FatalError(f"{name} has a parameter {SANDBOX!r}: it wants reward.sandbox = true, or a URL")
    function = partial(function, **wanted)
    if "completions" in parameters:
        return Batched(name, lambda items: function(**trl_arguments(items, parameters, takes_any)), timeout_s, tick)
    if "solution_str" in parameters:
        return OneByOne(name, lambda item: function(**verl_arguments(item, parameters, takes_any)), timeout_s, tick)
    raise FatalError(
        f"{name} takes ({', '.join(parameters)}); wants verl's (data_source, solution_str, ground_truth, extra_info) "
        "or TRL's (prompts, completions, **columns)"
    )


def verl_arguments(item: Item, parameters: Mapping[str, Any], takes_any: bool) -> dict[str, Any]:
    wanted: dict[str, Callable[[], Any]] = {
        "data_source": lambda: item.row.get("data_source", ""),
        "solution_str": lambda: item.response,
        "ground_truth": lambda: ground_truth(item.row),
        "extra_info": lambda: item.row.get("extra_info"),
    }
    return {name: value() for name, value in wanted.items() if takes_any or name in parameters}


def trl_arguments(items: Sequence[Item], parameters: Mapping[str, Any], takes_any: bool) -> dict[str, Any]:
    prompts = [item.row.get("prompt", item.prompt) for item in items]
    columns: dict[str, Any] = {
        name: [item.row.get(name) for item in items] for name in dict.fromkeys(n for item in items for n in item.row)
    }
    columns |= {
        "prompts": prompts,
        "completions": [_completion(prompt, item) for prompt, item in zip(prompts, items, strict=True)],
        "completion_ids": [item.response_tokens.tolist() for item in items],
    }
    columns.pop("prompt", None)  # as TRL: the prompts are `prompts`
    return columns if takes_any else {name: value for name, value in columns.items() if name in parameters}


def _completion(prompt: Any, item: Item) -> Any:
    if isinstance(prompt, list):
        return [{"role": "assistant", "content": item.response}]
    return cast(Any, item.response)
