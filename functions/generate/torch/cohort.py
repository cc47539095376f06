"""The rows of a cohort: which request each is, and what it has sampled so far. Arrays, no loop over rows per token."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from functions.base.samples import Finish
from functions.generate.engine.base import Request, Sample
from functions.generate.engine.keys_values import KeysValues
from functions.generate.engine.sampling import stream_keys
from functions.generate.engine.stops import Stops
from functions.generate.torch.cache import Cache

Ints = npt.NDArray[np.int64]


def survivors(alive: npt.NDArray[np.bool_]) -> Ints:
    """Row numbers that fill 0..count-1 with the rows alive and move the fewest: the last ones go into the gaps."""
    count = int(alive.sum())
    stay = np.arange(count)
    stay[~alive[:count]] = count + np.flatnonzero(alive[count:])
    return stay


class Cohort:
    """Rows that decode together."""

    def __init__(
        self, requests: Sequence[Request], cache: Cache, limits: Ints, seed: int, *,
        begun: npt.NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        """`limits`: most response tokens of each row; `begun`: how many of its response each row begins with (None:
        all that it has); all [rows]. The others go through decoding again, in place of what would be sampled."""
        self.cache = cache
        self.requests = [replace(request, cache=None) for request in requests]  # what came with them is in `cache`
        given = np.array([len(r.response) for r in requests])
        self._limit = limits
        self._tokens = np.zeros((len(requests), int(limits.max())), np.int32)
        self._logprobs = np.zeros((len(requests), int(limits.max())), np.float32)
        for row, request in enumerate(requests):
            self._tokens[row, : given[row]] = request.response
            self._logprobs[row, : given[row]] = request.logprobs
        self._given = given
        self.lengths = given.copy() if begun is None else begun.copy()
        """Response tokens of each row so far: the response position of the next."""
        self._prompt = np.array([len(r.prompt) for r in requests])
        group, index = np.array([(r.group, r.index) for r in requests], np.int64).T
        self.keys = stream_keys(seed, group, index)
        self._finish = np.zeros(len(requests), np.int32)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def last(self) -> npt.NDArray[np.int32]:
        """The latest token of each row, and..."""
        tokens: npt.NDArray[np.int32] = self._tokens[np.arange(len(self)), self.lengths - 1]
        return tokens

    @property
    def positions(self) -> Ints:
        """...where it stands: prompt and response counted together, from 0."""
        positions: Ints = self._prompt + self.lengths - 1
        return positions

    @property
    def done(self) -> bool:
        """Whether any row is."""
        return bool(self._finish.any())

    def so_far(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Prompt and response of a row, before its next token."""
        return self.requests[row].prompt, self._tokens[row, : self.lengths[row]]

    def record(self, tokens: Ints, logprobs: npt.NDArray[np.float32], stops: Stops) -> None:
        """Appends what was sampled for each row; a row that replays keeps its own token."""
        rows, at = np.arange(len(self)), self.lengths
        new = at >= self._given
        self._tokens[rows[new], at[new]] = tokens[new]
        self._logprobs[rows[new], at[new]] = logprobs[new]
        self.lengths = at + 1
        self._finish[self.lengths >= self._limit] = Finish.LENGTH
        self._finish[new & np.isin(tokens, stops.ids)] = Finish.STOP
        if stops:
            for row in np.flatnonzero(new & (self._finish != Finish.STOP)).tolist():
                if stops.in_text(self._tokens[row, : self.lengths[row]]):
                    self._finish[row] = Finish.STOP

    def release(self, version: int, keep_from: int | None = None) -> list[Sample]:
        """The rows that are done, which leave the cohort; `keep_from` of Sampling."""
        alive = self._finish == Finish.UNFINISHED
        done = [self._sample(row, version) for row in np.flatnonzero(~alive).tolist()]
        if keep_from is not None:
            for at, row in enumerate(np.flatnonzero(~alive).tolist()):
                if done[at].finish == Finish.STOP and int(self.positions[row]) + 1 >= keep_from:
                    done[at] = replace(done[at], cache=KeysValues(self.cache.of(row), "scaled pairs"))
        stay = survivors(alive)
        self.cache.keep(stay)
        self.requests = [self.requests[i] for i in stay]
        for name in ("_tokens", "_logprobs", "_limit", "_given", "lengths", "_prompt", "keys", "_finish"):
            setattr(self, name, getattr(self, name)[stay])
        return done

    def rest(self, version: int) -> Iterator[Sample]:
        """All rows, as far as they have come; those in mid-replay without keys and values, which lack some."""
        for row in range(len(self)):
            sample = self._sample(row, version)
            replaying = self.lengths[row] < self._given[row]
            yield sample if replaying else replace(sample, cache=KeysValues(self.cache.of(row), "scaled pairs"))

    def _sample(self, row: int, version: int) -> Sample:
        # A replay that is cut keeps the tokens that it was given.
        length = max(int(self.lengths[row]), int(self._given[row]))
        return Sample(
            number=self.requests[row].number,
            response=self._tokens[row, :length].copy(),
            logprobs=self._logprobs[row, :length].copy(),
            finish=Finish(int(self._finish[row])),
            version=version,
        )
