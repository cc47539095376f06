"""Data sets of prompts: JSONL and parquet, in the three schemas that people have, read as they are.

    verl       data_source, prompt: [{role, content}], ability, reward_model: {style, ground_truth}, extra_info
    TRL        prompt: str | [{role, content}], any further columns
    OpenRLHF   input: str | [{role, content}], label

A row keeps all of its columns: they are what a reward function gets. Training draws rows with a `Cursor`, a place in an
endless shuffled sequence that depends on nothing but (seed, number of rows); it is part of every commit, so a resumed
job goes on with exactly the row that comes next, whatever epoch it was in.
"""

import array
import datetime
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import xxhash

from functions.base.chat import Prompt
from functions.base.rows import ground_truths
from functions.base.wire import Json
from orchestrator.base.errors import DataError

NAMED = 8
"""How many offending rows an error names before it only counts."""


@dataclass(frozen=True)
class Row:
    """One prompt. Its columns are kept as JSON text and parsed when asked for: a tenth of the memory."""

    prompt_id: int
    """Its place in the data set, from 0: the same in every epoch and split."""
    where: str
    """`train.jsonl:17` (line, from 1) or `train.parquet, row 16` (from 0), for messages."""
    data_source: str
    encoded: bytes
    prompt_key: str | None = None
    """Column of the prompt; None: `prompt` or `input`."""

    @property
    def columns(self) -> Json:
        """As the file has them."""
        columns: Json = json.loads(self.encoded)
        return columns

    @property
    def prompt(self) -> Prompt:
        prompt: Prompt = _column(self.columns, self.prompt_key)[1]
        return prompt

    def to_json(self) -> Json:
        """What a scorer gets: the file's columns, and `prompt_id`, `data_source` and (where known) `ground_truth`."""
        columns = self.columns
        truth = next(ground_truths(columns), None)
        known = {} if truth is None else {"ground_truth": truth}
        return {**columns, "prompt_id": self.prompt_id, "data_source": self.data_source, **known}


def _column(columns: Json, key: str | None) -> tuple[str, Any]:
    """The prompt's column and what it holds (None: there is none)."""
    name = key or "prompt" if key or "prompt" in columns else "input"
    return name, columns.get(name)


# --- reading -------------------------------------------------------------------------------------------------------


def read_rows(*paths: Path, prompt_key: str | None = None) -> list[Row]:
    """All rows of the files (`.jsonl` or `.parquet`), in their order. Raises DataError naming file, line and field."""
    rows: list[Row] = []
    for path in paths:
        if path.suffix not in (".jsonl", ".parquet"):
            raise DataError(f"{path}: not a data set: want a file ending in .jsonl or .parquet")
        try:
            found = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
            numbered = enumerate(found, start=len(rows))
            rows += [_row(number, where, columns, prompt_key) for number, (where, columns) in numbered]
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: has no rows; want at least one prompt")
    return rows


def _jsonl(path: Path) -> Iterator[tuple[str, Json]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = json.loads(line, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not a line of JSON: {error}") from None
            if not isinstance(value, dict):
                raise DataError(f"{where}: want a JSON object with the field 'prompt', got {_short(value)}")
            yield where, value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} has no JSON form")


def _parquet(path: Path) -> Iterator[tuple[str, Json]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    where = f"{path}, row {number}"
                    yield where, {name: _plain(value, where, name) for name, value in columns.items()}
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file: {_short(str(error))}") from None


def _plain(value: Any, where: str, field: str) -> Any:
    """Arrow's Python values as JSON values; times become ISO 8601 strings."""
    if isinstance(value, dict):
        return {key: _plain(part, where, f"{field}.{key}") for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, where, field) for part in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: field '{field}' is {value}, which has no JSON form; want a finite number or null")
    if value is None or isinstance(value, str | int | float):
        return value
    raise DataError(
        f"{where}: field '{field}' is of type {type(value).__name__}, which has no JSON form; drop the column"
    )


def _row(number: int, where: str, columns: Json, key: str | None) -> Row:
    name, prompt = _column(columns, key)
    if name not in columns:
        wanted = f"'{key}' (data.prompt_key)" if key else "'prompt' (verl, TRL) or 'input' (OpenRLHF)"
        got = ", ".join(f"'{key}'" for key in list(columns)[:NAMED]) or "none"
        raise DataError(f"{where}: no field {wanted}; its fields: {got}")
    _check_prompt(where, name, prompt)
    source = columns.get("data_source", "default")
    if not isinstance(source, str) or not source:
        raise DataError(f"{where}: field 'data_source' is {_short(source)}; want a name")
    try:
        return Row(number, where, source, json.dumps(columns, ensure_ascii=False).encode(), key)
    except UnicodeEncodeError:
        raise DataError(f"{where}: holds half of a surrogate pair, which is no text") from None


def _check_prompt(where: str, name: str, value: Any) -> None:
    if isinstance(value, str) and value:
        return
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: field '{name}' is {_short(value)}; want text, or a list of messages (role, content)")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise DataError(f"{where}: field '{name}[{i}]' is {_short(message)}; want an object with role and content")
        for field, types in (("role", str), ("content", str | list)):
            if not isinstance(message.get(field), types):
                raise DataError(f"{where}: field '{name}[{i}].{field}' is {_short(message.get(field))}; want text")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split()) if not isinstance(value, str) else repr(value)
    return "missing or null" if value is None else text if len(text) <= 80 else f"{text[:77]}..."


# --- splitting and limits ------------------------------------------------------------------------------------------


def split(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(train, validation): `fraction` of the rows held out (at least one), chosen by `seed`; both in file order.

    Raises DataError where a side would be left without rows.
    """
    count = max(1, round(len(rows) * fraction))
    if count >= len(rows):
        raise DataError(
            f"data.validation_fraction = {fraction} leaves {max(0, len(rows) - count)} of {len(rows)} rows "
            "to train on; want a smaller fraction or more rows"
        )
    held_out = set(shuffled(len(rows), seed, "validation")[:count])
    train = [row for i, row in enumerate(rows) if i not in held_out]
    return train, [row for i, row in enumerate(rows) if i in held_out]


@dataclass(frozen=True)
class Tokenized:
    """Rows with their prompts as token ids, aligned; `dropped` are the rows over the limit, with their lengths."""

    rows: Sequence[Row]
    tokens: Sequence[Sequence[int]]
    dropped: Sequence[tuple[Row, int]]

    def describe_dropped(self) -> str:
        """One line that counts and names them; "" where there are none."""
        return _name_over_long(self.dropped, len(self.rows) + len(self.dropped)) if self.dropped else ""


def tokenize(
    rows: Sequence[Row], encode: Callable[[Row], Sequence[int]], *, max_prompt_length: int,
    over_long: Literal["error", "drop"] = "error",
) -> Tokenized:  # fmt: skip
    """Encodes every prompt. Prompts over `max_prompt_length` tokens are never cut: an error, or dropped and named.

    Raises DataError where `encode` raises ValueError (naming the row), where over-long prompts are an error, and where
    nothing is left.
    """
    kept: list[Row] = []
    tokens: list[Sequence[int]] = []
    dropped: list[tuple[Row, int]] = []
    for row in rows:
        try:
            ids = encode(row)
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from error
        if not ids:
            raise DataError(f"{row.where}: the prompt has no tokens; want at least one")
        if len(ids) > max_prompt_length:
            dropped.append((row, len(ids)))
        else:
            kept.append(row)
            tokens.append(array.array("i", ids))
    if dropped and (over_long == "error" or not kept):
        raise DataError(
            f"{_name_over_long(dropped, len(rows))}; raise data.max_prompt_length (now {max_prompt_length})"
            + (' or set data.over_long = "drop"' if kept else "")
        )
    return Tokenized(kept, tokens, dropped)


def _name_over_long(dropped: Sequence[tuple[Row, int]], total: int) -> str:
    named = ", ".join(f"{row.where} ({length} tokens)" for row, length in dropped[:NAMED])
    more = f" and {len(dropped) - NAMED} more" if len(dropped) > NAMED else ""
    return f"{len(dropped)} of {total} prompts are over the length limit: {named}{more}"


# --- drawing -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def shuffled(count: int, seed: int, purpose: str) -> Sequence[int]:
    """0..count-1 in the order of xxh3-64(f"{seed}/{purpose}/{i}"): the same on every machine and Python."""
    return sorted(range(count), key=lambda i: (xxhash.xxh3_64_intdigest(f"{seed}/{purpose}/{i}".encode()), i))


@dataclass(frozen=True)
class Cursor:
    """The next row to draw: `position` rows of epoch `epoch` have been drawn. At an epoch's end: (epoch + 1, 0)."""

    epoch: int
    position: int
    seed: int

    @classmethod
    def start(cls, seed: int) -> Self:
        return cls(0, 0, seed)

    def to_json(self) -> Json:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    @classmethod
    def from_json(cls, value: Any) -> Self:
        try:
            return cls(int(value["epoch"]), int(value["position"]), int(value["seed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a data cursor: {value!r}; want epoch, position and seed") from error


def next_batch(cursor: Cursor, count: int, size: int, *, shuffle: bool = True) -> tuple[list[int], Cursor]:
    """The indices (of `count` rows) of the next `size` rows, and the cursor after them.

    Each epoch has every row once, in an order of its own. A batch goes on into the next epoch where this one ends;
    data sets smaller than the batch are gone through as often as it takes. Raises DataError for a cursor that the
    data set cannot have been left at: it has been changed since.
    """
    if count < 1 or not 0 <= cursor.position < count:
        raise DataError(
            f"the data set has {count} rows, the job's cursor is at row {cursor.position} of epoch {cursor.epoch}: "
            "it was changed since the job began; restore it"
        )
    epoch, position, drawn = cursor.epoch, cursor.position, list[int]()
    while len(drawn) < size:
        order = shuffled(count, cursor.seed, f"epoch {epoch}") if shuffle else range(count)
        part = order[position : position + size - len(drawn)]
        drawn.extend(part)
        position += len(part)
        if position == count:
            epoch, position = epoch + 1, 0
    return drawn, Cursor(epoch, position, cursor.seed)


def digest(rows: Sequence[Row]) -> str:
    """xxh3-128 of all columns of all rows: what a job was started on. A resumed job on other data is another job."""
    hashed = xxhash.xxh3_128()
    for row in rows:
        hashed.update(json.dumps(row.columns, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()
