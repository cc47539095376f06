"""From a call's params (JSON) to a frozen dataclass: every error names the key and what would be right."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from functions.base.suggest import did_you_mean
from functions.call.function import FatalError

Params = TypeVar("Params")


def parse(kind: type[Params], value: Mapping[str, Any], where: str) -> Params:
    """Builds dataclass `kind` from JSON, nested dataclasses too. Raises FatalError in one line.

    Checked here: unknown keys (with a did-you-mean), missing keys, types (an int passes as float, never a bool as a
    number). Ranges are the dataclass's own business: a ValueError of its __post_init__ is passed on with the place.
    """
    if not isinstance(value, Mapping):
        raise FatalError(f"{where}: got {value!r}, wants an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in value:
        if name not in fields:
            hint = did_you_mean(str(name), fields) or f"; known are {', '.join(sorted(fields))}"
            raise FatalError(f"{where}: unknown key {name!r}{hint}")
    types_of = typing.get_type_hints(kind)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _convert(types_of[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise FatalError(f"{where}: lacks key {name!r}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise FatalError(f"{where}: {error}") from error


def _convert(wanted: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        *words, last = [a for a in arguments if a is not type(None)]  # of several, the first are Literals
        known = [word for inner in words for word in typing.get_args(inner)]
        if isinstance(value, str) and words:
            if value not in known:
                raise FatalError(f"{where}: got {value!r}, wants {last.__name__} or {', '.join(map(repr, known))}")
            return value
        return _convert(last, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise FatalError(f"{where}: got {value!r}, wants one of {', '.join(map(repr, arguments))}")
        return value
    if dataclasses.is_dataclass(wanted) and isinstance(wanted, type):
        return parse(wanted, value, where)
    if origin is tuple:
        item = arguments[0]
        length = None if arguments[-1] is Ellipsis else len(arguments)
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            raise FatalError(f"{where}: got {value!r}, wants a list" + (f" of {length}" if length else ""))
        return tuple(_convert(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise FatalError(f"{where}: got {value!r}, wants an object")
        return dict(value)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise FatalError(f"{where}: got {value!r}, wants {wanted.__name__}")
    return value
