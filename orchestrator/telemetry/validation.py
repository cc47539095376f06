"""Which of a validation's metrics are shown: verl's core variable, `acc` where the scorer gives one, else `reward`."""

from collections.abc import Iterable

PREFIX = "val-core/"


def validation_names(names: Iterable[str]) -> list[str]:
    """Of each data source `val-core/<data source>/acc/mean@n`, or without one `.../reward/mean@n`; by name."""
    found: dict[str, str] = {}
    for name in sorted(name for name in names if name.startswith(PREFIX)):
        source, variable, _ = name.removeprefix(PREFIX).rsplit("/", 2)
        if variable in ("acc", "reward"):
            found.setdefault(source, name)  # acc comes first
    return sorted(found.values())
