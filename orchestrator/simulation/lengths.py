"""How long responses turn out to be in a simulation: drawn from a distribution, or replayed from a trace.

A length depends on (seed, step, prompt, index) alone: every policy meets the same work, however it arranges it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import xxhash

_NORMAL = NormalDist()


class Lengths(Protocol):
    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        """Tokens of the response, without a cap (the call's max_response_length cuts it)."""


@dataclass(frozen=True)
class Lognormal:
    """ln L = mu + between * z(prompt) + within * z(step, prompt, index) + drift * step, with standard normal z.

    `between` is what a prompt keeps from epoch to epoch, `within` what samples of one prompt differ by.
    """

    mu: float
    between: float
    within: float
    seed: int = 0
    drift: float = 0.0

    @classmethod
    def of(cls, mean: float, sigma: float, *, kept: float = 0.7, seed: int = 0) -> Self:
        """By its mean and its sigma; `kept`: share of the variance that is the prompt's own.

        With sigma 0.86 and mean 220 this is the conversation trace of the references (mu 5.02).
        """
        return cls(math.log(mean) - sigma**2 / 2, sigma * kept**0.5, sigma * (1 - kept) ** 0.5, seed)

    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        own = xxhash.xxh3_64_intdigest(np.ascontiguousarray(prompt).tobytes(), self.seed)
        z = normal(f"{own}")
        noise = normal(f"{own}/{step}/{index}")
        return max(1, round(math.exp(self.mu + self.between * z + self.within * noise + self.drift * step)))


@dataclass(frozen=True)
class LengthTrace:
    """Recorded lengths, by (step, group, index)."""

    lengths: Mapping[tuple[int, int, int], int]

    @classmethod
    def read(cls, path: Path) -> Self:
        """JSON lines with integers `step`, `group`, `index`, `length`. Raises ValueError naming file and line."""
        lengths: dict[tuple[int, int, int], int] = {}
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            missing = [name for name in ("step", "group", "index", "length") if not isinstance(value.get(name), int)]
            if missing:
                raise ValueError(f"{path}:{number}: lacks {', '.join(missing)} (wants integers in each line)")
            if value["length"] < 1:
                raise ValueError(f"{path}:{number}: length is {value['length']} (wants >= 1)")
            lengths[value["step"], value["group"], value["index"]] = value["length"]
        if not lengths:
            raise ValueError(f"{path}: an empty trace")
        return cls(lengths)

    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        found = self.lengths.get((step, group, index))
        if found is None:
            raise ValueError(f"the trace has no sample for step {step}, group {group}, index {index}")
        return found


@dataclass(frozen=True)
class Turns:
    """Lengths, in turns. As those all depends on (seed, step, prompt, index, turn) alone: every policy meets the same
    episodes. An answer takes a lognormal time by its median and its 99th percentile."""

    lengths: Lengths
    """Of what the policy writes in an episode, all turns together."""
    median_s: float
    p99_s: float
    turns: int
    """Of an episode at most; two to that many are as likely."""
    observation_tokens: int
    timeout_s: float
    """No answer takes longer."""
    seed: int = 0

    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        """Of the whole response, its observations included."""
        return self.ends(step, group, index, prompt)[-1]

    def count(self, step: int, group: int, index: int) -> int:
        """Turns of an episode."""
        return 2 + int(_NORMAL.cdf(normal(f"{self.seed}/{step}/{group}/{index}/turns")) * (self.turns - 1))

    def ends(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> list[int]:
        """Tokens of the response at the end of each turn."""
        count = self.count(step, group, index)
        written = max(count, self.lengths.length(step, group, index, prompt))
        return [-(-written * turn // count) + (turn - 1) * self.observation_tokens for turn in range(1, count + 1)]

    def answer_s(self, step: int, group: int, index: int, turn: int) -> float:
        sigma = math.log(self.p99_s / self.median_s) / _NORMAL.inv_cdf(0.99)
        drawn_s = self.median_s * math.exp(sigma * normal(f"{self.seed}/{step}/{group}/{index}/{turn}"))
        return min(self.timeout_s, drawn_s)


def normal(key: str) -> float:
    """A standard normal number that depends on `key` alone."""
    return _NORMAL.inv_cdf((xxhash.xxh3_64_intdigest(key.encode()) + 0.5) / 2.0**64)
