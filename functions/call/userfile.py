"""Objects named by the user: `path/to/file.py:name`, `package.module:name`, or `exchange:files/<sha>/file.py:name`.

The last is a file that the orchestrator has put into the job's exchange, for replicas that do not see the user's disk
(`carried`). It is kept in a directory of this process, under its name, so that tracebacks show it.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from functions.call.function import FatalError

CARRIED = "exchange:"
_source: Callable[[str], bytes] | None = None


def carried_by(source: Callable[[str], bytes] | None) -> None:
    """Where this process gets carried files from: `source` gives the value of a key of the job's exchange."""
    global _source
    _source = source


def load(name: str) -> Any:
    """The object that `name` names. A file is run once in a process and found again until its content changes.

    Raises FatalError in one line: no such file, module or attribute, or what the file raised, and in which line.
    """
    where, colon, attribute = name.rpartition(":")
    if where.startswith(CARRIED):
        where = str(_carried(where.removeprefix(CARRIED)))
    if not (where and colon and attribute.isidentifier()):
        raise FatalError(f"{name!r} names no object: wants 'path/to/file.py:name' or 'package.module:name'")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise FatalError(f"{where} has no {attribute!r}") from None


def _carried(key: str) -> Path:
    """The carried file on this machine's disk."""
    if _source is None:
        raise FatalError(f"{key} lies in a job's exchange, and this process has none")
    path = Path(tempfile.gettempdir(), f"rlhf-userfiles-{os.getuid()}", key)
    digest = path.parent.name
    if not path.exists() or not _is(path.read_bytes(), digest):
        data = _source(key)
        if not _is(data, digest):
            raise FatalError(f"{key}: its content is not what its name says; it was altered since the job was accepted")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_bytes(data)
        temporary.replace(path)
    return path


def _is(content: bytes, digest: str) -> bool:
    return hashlib.sha256(content).hexdigest().startswith(digest)


def _from_file(path: Path) -> ModuleType:
    try:
        path = path.expanduser().resolve()
        content = path.read_bytes()
    except OSError as error:
        raise FatalError(f"cannot read {path}: {error.strerror}") from error
    name = f"userfile_{hashlib.sha256(str(path).encode() + content).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a .py path always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise FatalError(f"{path} cannot be imported: {describe(error)}") from error
    return module


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise FatalError(f"{name} cannot be imported: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """One line: type, message, and the file and line that raised it."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, MemoryError) or "can't allocate memory" in message:
        message += f"{': ' if message else ''}its replica may take no more -> raise memory_gb of its function"
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {message}{where}" if message else f"{type(error).__name__}{where}"
