"""What a data set's row says: fields by the names that verl, TRL and others have for them."""

from collections.abc import Iterator, Mapping
from typing import Any

TRUTH_FIELDS = ("ground_truth", "answer", "solution", "label")


def ground_truths(row: Mapping[str, Any]) -> Iterator[Any]:
    """The right answers that a row has, the first one first: verl's `reward_model.ground_truth`, then TRUTH_FIELDS."""
    nested = row.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        yield nested["ground_truth"]
    yield from (row[name] for name in TRUTH_FIELDS if name in row)
