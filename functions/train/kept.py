"""What a rank of a gang keeps without the gang: its part of a version, for the next gang that gives it the same place.

    a peer is lost before an optimizer step     what was loaded is still that: the next attempt reads what the peer had
    a version is published                      what made it: the next step reads nothing
Elastic: a rank that is new reads its own part, no other one's (functions/train/parts.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from functions.base.wire import Version
from functions.call.parallel import AXES
from functions.models.tensor_parallel import local
from functions.train.gang import Ranks
from functions.train.optimizer import MASTER, Optimizer


@dataclass(frozen=True)
class Kept:
    version: Version
    place: object
    """In the gang, and what the model was loaded as."""
    rows: Mapping[str, Tensor]
    """By the names that a manifest has; of tp that divides columns, columns."""

    @classmethod
    def of(cls, version: Version, structure: object, ranks: Ranks, optimizer: Optimizer) -> Self:
        weights = {name: local(parameter) for name, parameter in optimizer.named.items()}
        return cls(version, _place(structure, ranks), weights | optimizer.rows)


def kept_for(kept: Sequence[Kept], version: Version, structure: object, ranks: Ranks) -> Mapping[str, Tensor]:
    """What is kept of `version`; {} where it is another's. All ranks call it together: where tp divides columns they
    read together, so that all keep something or nobody does."""
    place = _place(structure, ranks)
    found = next((own.rows for own in kept if (own.version, own.place) == (version, place)), {})
    if ranks.count("tp") > 1 and not all(value["kept"] for value in ranks.gather({"kept": bool(found)})):
        return {}
    return {name: rows for own, rows in found.items() for name in (own, MASTER + own)}


def _place(structure: object, ranks: Ranks) -> object:
    return structure, [(ranks.place(axis), ranks.count(axis)) for axis in AXES]
