"""What a planner may decide, and what is fixed: a policy is a set of switches. A job has one of two.

| | replicas | shards | cut | tail goes on | fused | streamed training | kept |
|---|---|---|---|---|---|---|---|
| static | all | balanced | never | | yes | no | none, or all |
| adaptive | the goal's | chosen | chosen | there, or tail function | chosen | where exact | none, prewarmed |

Simulations have more to compare with (orchestrator/simulation/baselines.py).
"""

from dataclasses import dataclass
from typing import Literal

Cut = Literal["never", "fixed", "chosen"]
Fuse = Literal["no", "yes", "chosen"]


@dataclass(frozen=True)
class Policy:
    name: str
    replicas: Literal["all", "weighted", "goal"]
    """All that are allowed; argmin lam T / T_all + (1 - lam) C / C_all (RLHFless, lam = 0.5); or what the goal says."""
    shards: Literal["balanced", "similar", "chosen"]
    """Equal work in each; runs of similar predicted length; or whichever of the two the goal prefers."""
    cut: Cut
    fuse: Fuse
    """Whether finished samples are handed on while generation runs: always, or as pays."""
    keep: bool
    """All functions stay up between steps; else none does."""
    prewarm: bool
    colocated: bool
    """All functions take turns on one pool of GPUs that is held for the whole job."""
    stream: bool = False
    """Training begins while generation goes on, where that is exact; ranks of a gang as the goal says."""
    tail_function: bool = False
    """The tail may go on with a second function whose replicas have more GPUs (PAT, arXiv 2605.23945)."""
    old_logprobs: bool = True
    """In simulations: log-probabilities of the policy are a pass of their own before training, as in verl (and what is
    built on it); else the first training pass has them."""
    cut_fraction: float = 0.2
    """With cut = "fixed": share of the step's samples that is left when the tail is cut (R_t)."""


STATIC = Policy("static", "all", "balanced", "never", "yes", keep=False, prewarm=False, colocated=False)
ADAPTIVE = Policy(
    "adaptive", "goal", "chosen", "chosen", "chosen", keep=False, prewarm=True, colocated=False, stream=True,
    tail_function=True, old_logprobs=False,
)  # fmt: skip
_HELD: tuple[tuple[Cut, Fuse], ...] = (("never", "no"), ("fixed", "yes"), ("chosen", "yes"))
TURNS = tuple(
    Policy("turns", "all", "balanced", *how, keep=True, prewarm=False, colocated=True, old_logprobs=False)
    for how in _HELD
)
"""Ways to hold all GPUs and take turns on them, which `adaptive` weighs where functions can: as a reserved cluster
does, as RLHFuse does, with a cut that is chosen. Where fewer are held, the last one alone."""
