"""Policies as named sets of switches: what a planner may decide, and what is fixed.

| | replicas | shards | cut | tail goes on | fused | train fed | kept |
|---|---|---|---|---|---|---|---|
| serverful | all, always | balanced | never | | no | no | all |
| rlhfuse | all, always | balanced | at 20 % | on replicas of generate | yes | no | all |
| rlhfless | weighted T, C | similar | at 20 % | on replicas of generate | no | no | none, prewarmed |
| ours | the goal's | chosen | chosen | there, or wide | chosen | where exact | ski rental, prewarmed |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policy:
    name: str
    replicas: Literal["all", "weighted", "goal"]
    """All that are allowed; argmin lam T / T_all + (1 - lam) C / C_all (RLHFless, lam = 0.5); or what the goal says."""
    shards: Literal["balanced", "similar", "chosen"]
    """Equal work in each; runs of similar predicted length; or whichever of the two the goal prefers."""
    cut: Literal["never", "fixed", "chosen"]
    fuse: Literal["no", "yes", "chosen"]
    """Whether finished samples are handed on while generation runs: always, or as pays."""
    keep: Literal["all", "none", "rental"]
    prewarm: bool
    colocated: bool
    """All functions take turns on one pool of GPUs that is held for the whole job."""
    feed: bool = False
    """Training begins while generation goes on, where that is exact; ranks of a gang as the goal says."""
    wide: bool = False
    """The tail may go on with a second function whose replicas have more GPUs (PAT, arXiv 2605.23945)."""
    old_logprobs: bool = True
    """In simulations: log-probabilities of the policy are a pass of their own before training, as in verl (and what is
    built on it); else the first training pass has them."""
    cut_fraction: float = 0.2
    """With cut = "fixed": share of the step's samples that is left when the tail is cut (R_t)."""


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("serverful", "all", "balanced", "never", "no", "all", prewarm=False, colocated=True),
        Policy("rlhfuse", "all", "balanced", "fixed", "yes", "all", prewarm=False, colocated=True),
        Policy("rlhfless", "weighted", "similar", "fixed", "no", "none", prewarm=True, colocated=False),
        Policy(
            "ours",
            "goal",
            "chosen",
            "chosen",
            "chosen",
            "rental",
            prewarm=True,
            colocated=False,
            feed=True,
            wide=True,
            old_logprobs=False,
        ),
    )
}


def policy(name: str) -> Policy:
    """The policy called `name`. Raises ValueError listing them for one that is not known."""
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is not known (wants one of {', '.join(POLICIES)})")
    return POLICIES[name]
