"""Reading data sets: the three schemas, and every way in which a file can be wrong."""

from __future__ import annotations

import datetime
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from orchestrator.base.errors import DataError
from orchestrator.job.data import digest, read_rows, split, tokenize

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}
SCHEMAS: list[tuple[dict[str, Any], Any, Any, str]] = [
    (VERL, [{"role": "user", "content": "1+1?"}], "2", "openai/gsm8k"),
    ({"prompt": "1+1?", "answer": "2"}, "1+1?", "2", "default"),
    ({"prompt": [{"role": "user", "content": "1+1?"}], "solution": "2"}, VERL["prompt"], "2", "default"),
    ({"input": "1+1?", "label": "2"}, "1+1?", "2", "default"),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("columns", "prompt", "truth", "source"), SCHEMAS)
def test_schemas_read_without_conversion(
    tmp_path: Path, suffix: str, columns: dict[str, Any], prompt: Any, truth: Any, source: str
) -> None:
    rows = read_rows(write(tmp_path / f"d.{suffix}", [columns, columns]))
    assert [row.prompt_id for row in rows] == [0, 1]
    assert rows[1].prompt == prompt
    assert rows[1].columns == columns
    assert rows[1].to_json() == {**columns, "prompt_id": 1, "data_source": source, "ground_truth": truth}


def test_both_formats_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": i, "score": i / 2, "tags": ["a", "b"], "note": None} for i in range(2500)]
    one, two = read_rows(write(tmp_path / "d.jsonl", rows)), read_rows(write(tmp_path / "d.parquet", rows))
    assert [(r.prompt_id, r.prompt, r.columns) for r in one] == [(r.prompt_id, r.prompt, r.columns) for r in two]
    assert digest(one) == digest(two)
    assert digest(one[:-1]) != digest(one)


def test_blank_lines_are_skipped_and_still_counted(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}')
    assert [(row.prompt_id, row.where) for row in read_rows(path)] == [(0, f"{path}:1"), (1, f"{path}:3")]


GOOD = b'{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GOOD + b"{nope}\n", ":2: not a line of JSON"),
        (GOOD + b'{"prompt": "a", "x": NaN}\n', ":2: not a line of JSON: NaN has no JSON form"),
        (GOOD + b'{"prompt": "\xff"}\n', ":2: not a line of JSON"),
        (GOOD + b"[" * 100_000 + b"\n", ":2: not a line of JSON"),
        (GOOD + b'["a"]\n', ":2: want a JSON object with the field 'prompt', got ['a']"),
        (GOOD + b'{"question": "a", "answer": 1}\n', ":2: no field 'prompt' (verl, TRL) or 'input' (OpenRLHF); "
                                                     "its fields: 'question', 'answer'"),
        (GOOD + b'{"prompt": ""}\n', ":2: field 'prompt' is ''; want text"),
        (GOOD + b'{"prompt": null}\n', ":2: field 'prompt' is missing or null"),
        (GOOD + b'{"input": 3}\n', ":2: field 'input' is 3; want text"),
        (GOOD + b'{"prompt": []}\n', ":2: field 'prompt' is []"),
        (GOOD + b'{"prompt": ["a"]}\n', ":2: field 'prompt[0]' is 'a'; want an object with role and content"),
        (GOOD + b'{"prompt": [{"role": "user"}]}\n', ":2: field 'prompt[0].content' is missing or null"),
        (GOOD + b'{"prompt": [{"content": "a"}]}\n', ":2: field 'prompt[0].role' is missing or null"),
        (GOOD + b'{"prompt": "a", "data_source": 3}\n', ":2: field 'data_source' is 3; want a name"),
        (GOOD + b'{"prompt": "a\\ud800"}\n', ":2: holds half of a surrogate pair"),
        (b"\n", ": has no rows; want at least one prompt"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}{says}")
    assert "\n" not in str(error.value)


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match=r"d.parquet: not a parquet file"):
        read_rows(path)
    with pytest.raises(DataError, match=r"d.parquet, row 0: no field 'prompt'.*'question'"):
        read_rows(write(path, [{"question": "a"}]))
    with pytest.raises(DataError, match=r"d.parquet, row 2: field 'prompt' is missing or null"):
        read_rows(write(path, [{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}]))
    with pytest.raises(DataError, match=r"row 0: field 'image.bytes' is of type bytes, .* drop the column"):
        read_rows(write(path, [{"prompt": "a", "image": {"bytes": b"\x00"}}]))
    with pytest.raises(DataError, match=r"row 0: field 'x' is nan"):
        read_rows(write(path, [{"prompt": "a", "x": float("nan")}]))


def test_parquet_times_become_text(tmp_path: Path) -> None:
    path = write(tmp_path / "d.parquet", [{"prompt": "a", "at": datetime.datetime(2024, 1, 2, 3, 4)}])
    assert read_rows(path)[0].columns["at"] == "2024-01-02T03:04:00"


@pytest.mark.parametrize(
    ("name", "says"), [("d.csv", "want a file ending in .jsonl"), ("no.jsonl", "cannot be read: No")]
)
def test_no_data_set(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_rows(tmp_path / name)


def test_split_is_disjoint_whole_and_seeded(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "d.jsonl", [{"prompt": f"p{i}"} for i in range(100)]))
    train, held_out = split(rows, 0.2, seed=1)
    assert len(held_out) == 20
    assert sorted(r.prompt_id for r in train + held_out) == list(range(100))
    assert [r.prompt_id for r in held_out] == sorted(r.prompt_id for r in held_out)
    assert split(rows, 0.2, seed=1) == (train, held_out)
    assert split(rows, 0.2, seed=2)[1] != held_out
    assert len(split(rows, 0.0001, seed=1)[1]) == 1
    with pytest.raises(DataError, match=r"validation_fraction = 0.5 leaves 0 of 1 rows"):
        split(rows[:1], 0.5, seed=1)


def test_over_long_prompts_are_counted_and_named_never_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "x" * n} for n in (3, 9, 2, 12)])
    rows = read_rows(path)

    def encode(row: Any) -> list[int]:
        return [ord(c) for c in row.prompt]

    kept = tokenize(rows, encode, max_prompt_length=9, over_long="drop")
    assert [row.prompt_id for row in kept.rows] == [0, 1, 2]
    assert [list(ids) for ids in kept.tokens] == [[ord("x")] * n for n in (3, 9, 2)]
    assert kept.describe_dropped() == f"1 of 4 prompts are over the length limit: {path}:4 (12 tokens)"
    assert tokenize(rows, encode, max_prompt_length=12).describe_dropped() == ""
    with pytest.raises(DataError) as error:
        tokenize(rows, encode, max_prompt_length=8)
    assert str(error.value) == (
        f"2 of 4 prompts are over the length limit: {path}:2 (9 tokens), {path}:4 (12 tokens); "
        'raise data.max_prompt_length (now 8) or set data.over_long = "drop"'
    )
    with pytest.raises(DataError, match=r"4 of 4 prompts .* raise data.max_prompt_length \(now 1\)$"):
        tokenize(rows, encode, max_prompt_length=1, over_long="drop")


def test_what_the_tokenizer_refuses_is_named_by_its_row(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "d.jsonl", [{"prompt": "a"}]))

    def refuse(_: Any) -> list[int]:
        raise ValueError("the chat template refuses the messages: no system role")

    with pytest.raises(DataError, match=r"d.jsonl:1: the chat template refuses the messages"):
        tokenize(rows, refuse, max_prompt_length=9)
    with pytest.raises(DataError, match=r"d.jsonl:1: the prompt has no tokens"):
        tokenize(rows, lambda _: [], max_prompt_length=9)


def test_a_large_data_set_is_small_in_memory(tmp_path: Path) -> None:
    """20,000 prompts of 100 tokens and 1 KB: little more than their text and four bytes a token."""
    path = write(tmp_path / "d.jsonl", [{"prompt": f"p{i}", "answer": "x" * 1000} for i in range(20_000)])
    tracemalloc.start()
    try:
        kept = tokenize(read_rows(path), lambda _: [100_000 + i for i in range(100)], max_prompt_length=100)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept.rows) == 20_000
    assert used < 1.7 * (path.stat().st_size + 20_000 * 100 * 4)
