"""A name that is not known, and the one that was probably meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, within: str = "") -> str:
    """ "; did you mean 'x'?", or nothing where no name is near. `within` goes before the name that was meant."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {within + close[0]!r}?" if close else ""
