"""GPUs of a pool over time, as the functions of a step are placed one after the other; of many steps side by side.

What a step needs to know is from when on n GPUs are free for good, a(n). Who takes g of them until u, from the start
and longer than all that begins later, leaves a'(n) = max(a(n), min(u, a(n + g))).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.planner.arrays import Array, Flags, Numbers


class Room:
    """`gpus` None: each function has its own. [R] steps, or [R, B]: with what has been placed in B ways."""

    def __init__(self, gpus: int | None, free_s: Array | None = None, promised_s: Array | None = None) -> None:
        self.gpus = gpus
        self._free_s = np.zeros((1, 1)) if free_s is None else free_s
        """When so many are free for good. [R, 0 .. gpus; never more]"""
        self._promised_s = promised_s
        """The same with what is promised held from the start, and without what was placed before. None: nothing is."""
        self._promises = np.zeros(0, np.int64), np.zeros(0)
        """GPUs, and until when. [R]"""
        self._taken: list[tuple[Numbers, Array]] = []
        """Since."""

    @classmethod
    def after(cls, gpus: int | None, each: int, until_s: Array) -> Room:
        """Of a pool in which replicas of `each` GPUs are gone at `until_s`, ascending. [R, N]"""
        if gpus is None:
            return cls(None)
        sizes = np.arange(gpus + 1)
        missing = sizes - (gpus - each * until_s.shape[1])
        place = np.minimum(-(-missing // max(1, each)), until_s.shape[1])
        free_s = np.concatenate((np.zeros((len(until_s), 1)), until_s), axis=1)[:, np.maximum(place, 0)]
        return cls(gpus, np.concatenate((free_s, np.full((len(until_s), 1), np.inf)), axis=1))

    def promise(self, each: int, until_s: Array, from_s: Array) -> None:
        """To replicas of `each` GPUs from `from_s` [R] to each of `until_s` [R, M], 0.0: none, whenever they come
        before that: whoever is placed after this, and waits for what they make, leaves them room even if all goes
        otherwise than planned. What was placed before this does not wait for them.
        """
        if self.gpus is None:
            return
        ends_s, count = np.sort(until_s, axis=1), until_s.shape[1]
        before, late_s = self._free_s, self._free_s.copy()
        for k in range(count):  # until then, it and those that go later hold their GPUs
            held = min(each * (count - k), self.gpus + 1)
            later_s = np.full(before.shape, np.inf)
            later_s[:, : before.shape[1] - held] = before[:, held:]
            np.maximum(late_s, np.minimum(ends_s[:, k : k + 1], later_s), out=late_s)
        self._free_s = np.where(late_s > from_s[:, None], late_s, before)
        self._promises = each * np.count_nonzero(until_s, axis=1), ends_s[:, -1]
        self._promised_s = _less(self._nothing(), *self._promises)

    def begun(self, by_s: Array) -> None:
        """Those to whom it is promised have it by then, however late that comes. [R]"""
        if self._promised_s is None:
            return
        gpus, until_s = self._promises
        self._promised_s = _less(self._nothing(), gpus, np.minimum(until_s, by_s))
        for taken in self._taken:
            self._promised_s = _less(self._promised_s, *taken)

    def _nothing(self) -> Array:
        """Of an empty pool."""
        free_s = np.zeros(self._free_s.shape)
        free_s[..., -1] = np.inf
        return free_s

    def take(self, gpus: Numbers, until_s: Array) -> None:
        """[R]"""
        if self.gpus is None:
            return
        self._free_s = _less(self._free_s, gpus, until_s)
        if self._promised_s is not None:
            self._promised_s = _less(self._promised_s, gpus, until_s)
            self._taken.append((gpus, until_s))

    def less(self, rows: Numbers, gpus: Numbers, until_s: Array) -> Room:
        """With so many taken after the way `rows` [R, B'] of placing the others."""
        if self.gpus is None:
            return self

        def left(free_s: Array) -> Array:
            ways = free_s[:, None] if free_s.ndim == 2 else free_s
            return _less(np.take_along_axis(ways, rows[:, :, None], axis=1), gpus, until_s)

        return Room(self.gpus, left(self._free_s), None if self._promised_s is None else left(self._promised_s))

    def at_s(self, gpus: Sequence[int]) -> Array:
        """From when on so many are free for good. [R (, B), N]"""
        if self.gpus is None:
            return np.zeros((1, len(gpus)))
        sizes = np.minimum(gpus, self.gpus)
        found: Array = self._free_s[..., sizes]
        return found if self._promised_s is None else np.maximum(found, self._promised_s[..., sizes])

    def fits(self, gpus: Sequence[int]) -> Flags:
        """Whether so many are free at any time beside what is promised. [R, N]"""
        if self.gpus is None or self._promised_s is None:
            return np.ones((1, len(gpus)), np.bool_)
        places = np.minimum(gpus, self.gpus + 1)
        found: Flags = (self._promised_s[:, places] == 0.0) | (self._promises[0] == 0)[:, None]
        return found


def _less(free_s: Array, gpus: Numbers, until_s: Array) -> Array:
    """a' of a. [..., N], [...], [...]"""
    places = np.minimum(np.arange(free_s.shape[-1]) + gpus[..., None], free_s.shape[-1] - 1)
    later_s = np.take_along_axis(free_s, places, axis=-1)
    found: Array = np.maximum(free_s, np.minimum(until_s[..., None], later_s))
    return found
