"""Call a function chosen by name with what it asks for: how a recipe names an estimator or a loss."""

import inspect
from collections.abc import Callable, Mapping
from typing import TypeVar

Result = TypeVar("Result")


def call_with(
    function: Callable[..., Result], available: Mapping[str, object], options: Mapping[str, object] | None = None
) -> Result:
    """Call `function` with those of `available` that its keyword-only signature names, and with all `options`.

    available   tensors and totals the caller has; what the function does not name is not passed, nor is a None
    options     what the recipe sets (clip_low, gamma, ...); one the function does not name is a ValueError
    ValueError also for a required argument that neither provides.
    """
    chosen = dict(options or {})
    parameters = inspect.signature(function).parameters
    positional = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if positional:
        raise ValueError(f"{function.__qualname__}: {', '.join(positional)} must be keyword-only (put them after `*`)")
    unknown = sorted(set(chosen) - set(parameters))
    if unknown:
        raise ValueError(f"{function.__qualname__}: no option {', '.join(unknown)}; it takes {', '.join(parameters)}")
    provided = {name: value for name, value in available.items() if name in parameters and value is not None}
    arguments = {**provided, **chosen}
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ValueError(f"{function.__qualname__}: needs {', '.join(missing)}, which this recipe does not provide")
    return function(**arguments)
