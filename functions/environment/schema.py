"""Tools' schemas (JSON, as OpenAI's `tools`) from the signatures and docstrings of an environment's methods, and
whether what a model wrote fits them.

    def add(self, a: int, b: int = 0) -> int:            {"type": "function", "function": {"name": "add",
        '''Adds two numbers.                              "description": "Adds two numbers.",
                                                          "parameters": {"type": "object", "required": ["a"],
        Args:                                              "properties": {"a": {"type": "integer",
            a: The first.                                   "description": "The first."}, "b": {"type": "integer"}}}}}
        '''
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from functions.base.wire import Json

_TYPES: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean"}
_CHECKS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def schema(name: str, function: Callable[..., Any]) -> Json:
    """Of one method. Raises ValueError, in one line, for a parameter whose type has none."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise ValueError(f"tool {name}: its annotations cannot be read: {error}") from error
    description, described = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Json] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name}: parameter {parameter} has no name that a model could give")
        if parameter.name not in hints:
            raise ValueError(f"tool {name}: parameter {parameter.name!r} has no type; annotate it")
        kind = _type(hints[parameter.name], f"tool {name}: parameter {parameter.name!r}")
        told = {"description": described[parameter.name]} if parameter.name in described else {}
        properties[parameter.name] = kind | told
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def wrong(arguments: Any, parameters: Mapping[str, Any]) -> str | None:
    """Why `arguments` do not fit a tool's `parameters`, for the model to read; None where they do. What a schema says
    beyond types, names and enums is the tool's own to check."""
    if not isinstance(arguments, Mapping):
        return f"arguments must be an object, got {type(arguments).__name__}"
    properties = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"no argument {name!r}; there are {', '.join(properties) or 'none'}"
        if not _fits(value, properties[name]):
            wanted = properties[name].get("enum") or properties[name].get("type", "another type")
            return f"argument {name!r} must be {wanted}, got {value!r:.80}"
    return None


def _type(hint: Any, who: str) -> Json:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if hint is Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if kind is type(None) else _type(kind, who) for kind in inner]}
    if hint in (list, tuple, Sequence) or origin in (list, tuple, Sequence):
        return {"type": "array"} | ({"items": _type(inner[0], who)} if inner else {})
    if hint in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {"type": "object"}
    if typing.is_typeddict(hint):
        return {"type": "object"}
    raise ValueError(
        f"{who} is of type {hint}, which has no JSON form; wants int, float, str, bool, list, dict, Literal"
    )


def _fits(value: Any, kind: Mapping[str, Any]) -> bool:
    if "enum" in kind:
        return value in kind["enum"]
    if "anyOf" in kind:
        return any(_fits(value, other) for other in kind["anyOf"])
    wanted = kind.get("type")
    for name in [wanted] if isinstance(wanted, str) else wanted or []:
        types_ = _CHECKS.get(name, (object,))
        if isinstance(value, types_) and (name == "boolean" or not isinstance(value, bool)):
            items = kind.get("items")
            return not isinstance(value, list) or items is None or all(_fits(item, items) for item in value)
    return not wanted


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring (Google's style) says of a function and of its parameters."""
    head, _, rest = text.partition("\nArgs:")
    body = re.split(r"\n(?:Returns|Raises|Yields|Examples?):", rest)[0]
    return " ".join(re.split(r"\n(?:Returns|Raises|Yields|Examples?):", head)[0].split()), dict(_parameters(body))


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in body.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    name, said = "", list[str]()
    for line in lines:
        found = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line[indent:])
        if found:
            if name:
                yield name, " ".join(said)
            name, said = found[1], [found[2]]
        else:
            said.append(line.strip())
    if name:
        yield name, " ".join(said)
