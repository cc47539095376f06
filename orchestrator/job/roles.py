"""The functions that a job may have, one row each: everything that follows from a function's name stands here.

A further critic is two rows (who says its values, who trains it); a function of a further kind is one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.planner.base import TAIL


@dataclass(frozen=True)
class Role:
    name: str
    """Of the function: `[functions.<name>]`."""
    kind: Literal["generate", "environment", "reward", "reference", "train"]
    """What its replicas run (functions/server/kinds.py)."""
    operation: str
    """Of its calls."""
    model: str
    """Which of the job's models it asks, or trains: a job with this model has the function. The environment's is none
    of them."""
    directory: str
    """The job's key of the directory that the model starts from; not set: it starts from the policy's."""
    objective: Literal["policy", "value"] | None = None
    """What it trains the model for."""


# fmt: off
ROLES = (
    Role("generate",          "generate",  "generate", "actor",       "model.path"),
    Role(TAIL,                "generate",  "generate", "actor",       "model.path"),
    Role("environment",       "environment", "act",    "environment", "model.path"),
    Role("reward",            "reward",    "score",    "reward",      "reward.model"),
    Role("reference",         "reference", "logprobs", "reference",   "reference.path"),
    Role("critic",            "reference", "values",   "critic",      "critic.path"),
    Role("cost-critic",       "reference", "values",   "cost-critic", "critic.path"),
    Role("train-critic",      "train",     "train",    "critic",      "critic.path", "value"),
    Role("train-cost-critic", "train",     "train",    "cost-critic", "critic.path", "value"),
    Role("train",             "train",     "train",    "actor",       "model.path",  "policy"),
)
"""In the order in which a step first uses them."""
# fmt: on

BY_NAME: Mapping[str, Role] = {role.name: role for role in ROLES}
TRAINERS: Mapping[str, Role] = {role.model: role for role in ROLES if role.kind == "train"}
"""By the model that each trains."""
CRITICS = tuple(model for model, role in TRAINERS.items() if role.objective == "value")
ALWAYS = ("actor", "reward")
"""Models whose functions every job has; the reward's may be any scorer."""


def roles_of(models: Collection[str], *, tail: bool) -> list[Role]:
    """Of a job with these models; `tail`: and with a function of its own for a step's tail."""
    return [role for role in ROLES if role.model in {*ALWAYS, *models} and (tail or role.name != TAIL)]
