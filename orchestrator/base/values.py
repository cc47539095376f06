"""What no value of a job may be, whatever its key: a number that is not finite, a string that no file or wire takes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.base.errors import ConfigError


def check_values(table: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError, one line for each wrong value of a job's table, however deep it lies."""
    wrong = [f"{where}: {key}: {what}" for key, what in _wrong(table, ())]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _wrong(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        yield ".".join(path), f"got {value}, wants a finite number"
    elif isinstance(value, str) and ("\0" in value or _lone(value)):
        yield ".".join(path), f"got {value!r}, wants text without zero bytes, in UTF-8"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _wrong(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _wrong(inner, path)


def _lone(text: str) -> bool:
    """Whether it holds half a character, which cannot be encoded."""
    return any("\ud800" <= character <= "\udfff" for character in text)
