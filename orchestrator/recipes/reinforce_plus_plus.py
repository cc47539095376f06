"""REINFORCE++ and its baseline form: advantages normalised over the whole batch."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Hu 2025, arXiv 2501.03262",
    advantage="reinforce_plus_plus", loss="vanilla", aggregation="token-mean",
    kl={"where": "reward", "kind": "k1", "coef": 0.0},
)  # fmt: skip
async def reinforce_plus_plus(step: Step) -> None:
    """Returns whitened over the batch, no critic and no groups."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))


@recipe(
    paper="Hu 2025, arXiv 2501.03262, section 3.3",
    advantage="reinforce_plus_plus_baseline", loss="vanilla", aggregation="token-mean",
    kl={"where": "loss", "kind": "k2", "coef": 0.0},
)  # fmt: skip
async def reinforce_plus_plus_baseline(step: Step) -> None:
    """Scores less their group's mean, whitened over the batch."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))
