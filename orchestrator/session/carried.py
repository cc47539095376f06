"""A function of one's own as `<file.py>:<name>`, which is how a job names it and functions elsewhere import it.

One of a file is where it is. One of a notebook's cell is written into a file with what it uses of the notebook:
imports, constants, other functions. Whatever else it uses cannot be carried, and is named.
"""

import ast
import hashlib
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from orchestrator.base.errors import ConfigError
from orchestrator.recipes.base import Recipe


def place_of(key: str, given: Recipe | Callable[..., Any], directory: Path) -> str:
    """`directory` is for what is written. Raises ConfigError, beginning with `key`, for what has no name or file."""
    code = given.dataflow if isinstance(given, Recipe) else given
    name = getattr(code, "__qualname__", "") or repr(code)
    try:
        file = inspect.getsourcefile(code)
        source = "" if file is None or Path(file).is_file() else _source(key, code, {})
    except (TypeError, OSError):
        file = None
    if not name.isidentifier() or file is None:
        raise ConfigError(
            f"{key}: {name} cannot be imported elsewhere: wants what has its name at the top of a file, or a `def` "
            "of a notebook's cell"
        )
    if not source:
        return f"{Path(file).resolve()}:{name}"
    path = directory / hashlib.sha256(source.encode()).hexdigest()[:8] / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return f"{path.resolve()}:{name}"


def _source(key: str, code: Any, found: dict[str, str]) -> str:
    """What defines `code`, after what it uses."""
    name, namespace = code.__name__, code.__globals__
    found[name] = ""  # it may use itself
    text = textwrap.dedent(inspect.getsource(code))
    for used in sorted(set(_names(symtable.symtable(text, name, "exec"))) & set(namespace) - set(found)):
        value = namespace[used]
        home = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            found[used] = f"import {value.__name__} as {used}\n"
        elif home not in (None, "__main__") and hasattr(value, "__qualname__"):
            found[used] = f"from {home} import {value.__qualname__} as {used}\n"
        elif inspect.isfunction(value) and value.__name__ == used:
            _source(key, value, found)
        elif _constant(value):
            found[used] = f"{used} = {value!r}\n"
        else:
            kind = type(value).__name__
            raise ConfigError(f"{key}: {name} uses {used!r}, a {kind} of the notebook: make it inside of the function")
    found[name] = found.pop(name) + text
    return "".join(found.values())


def _names(table: symtable.SymbolTable) -> Iterator[str]:
    """What the source reads of its surroundings."""
    top = table.get_type() == "module"
    yield from (s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global()))
    for inner in table.get_children():
        yield from _names(inner)


def _constant(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False
