"""Bearer tokens from a file, one a line: `name read|write token` and its quota (quota.py); `#` begins a comment.

    dashboard  read   9b0c...
    ci         write  51f4...   jobs=2 gpus=8 usd_per_day=100

The file is read again when it changes, as a mounted Kubernetes secret does.

A server on loopback that is given no file makes one, `<runs>/.token`, as Jupyter does: commands that run beside that
directory find it, and the address that is printed has it.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.api.problems import ApiError
from orchestrator.api.quota import UNLIMITED, Quota
from orchestrator.base.errors import ConfigError
from orchestrator.base.files import writing

Role = Literal["read", "write"]
SHORTEST = 16
OWN = ".token"


@dataclass(frozen=True)
class Token:
    name: str
    role: Role
    digest: bytes
    quota: Quota = UNLIMITED


def parse_tokens(text: str, where: str) -> list[Token]:
    """Raises ConfigError with the line's number (never its content)."""
    tokens = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 3 or words[1] not in ("read", "write"):
            raise ConfigError(f"{where}:{number}: want `name read|write token`")
        if len(words[2]) < SHORTEST:
            raise ConfigError(f"{where}:{number}: the token of {words[0]!r} is shorter than {SHORTEST} characters")
        role: Role = "write" if words[1] == "write" else "read"
        quota = Quota.parse(words[3:], f"{where}:{number}: {words[0]}")
        tokens.append(Token(words[0], role, _digest(words[2]), quota))
    if not tokens:
        raise ConfigError(f"{where}: holds no token; want lines of `name read|write token`")
    return tokens


def own_token(runs: Path) -> Path:
    """The token file of a server that was given none: made once, for nobody but its owner to read. Raises RunError."""
    path = runs / OWN
    with writing(path):
        runs.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.chmod(0o600)
        else:
            number, temporary = tempfile.mkstemp(dir=runs, prefix=OWN)  # 0600
            with os.fdopen(number, "w") as file:
                file.write(f"local write {secrets.token_urlsafe(32)}\n")
            os.replace(temporary, path)
    return path


def read_token(path: Path) -> str:
    """A client's token: what a file holds, or the first of a server's (`name write token`). Raises OSError."""
    lines = [line for line in path.read_text().splitlines() if line.split()]
    return lines[0].split()[-1] if lines else ""


class Tokens:
    """The tokens of a file. Raises ConfigError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: list[Token] = []
        self._load()

    def _load(self) -> None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._tokens = parse_tokens(self._path.read_text(), str(self._path))
                self._stamp = stamp
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}: cannot be read: {error}") from error

    def quota(self, name: str) -> Quota:
        """Of the token of that name; one that is gone has none. Raises ConfigError."""
        self._load()
        return next((token.quota for token in self._tokens if token.name == name), UNLIMITED)

    def check(self, authorization: str | None, role: Role) -> str:
        """The name of the token in an Authorization header. Raises ApiError 401, or 403 for a role too low."""
        self._load()
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise ApiError(401, "send `Authorization: Bearer <token>`", headers={"WWW-Authenticate": "Bearer"})
        digest = _digest(secret.strip())
        found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        if not found:
            raise ApiError(401, "this token is not known", headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})
        if role == "write" and all(token.role == "read" for token in found):
            raise ApiError(
                403,
                f"the token {found[0].name!r} may only read",
                headers={"WWW-Authenticate": 'Bearer error="insufficient_scope"'},
            )
        return found[0].name


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
