"""RLOO: the mean score of a prompt's other samples is each sample's baseline."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Ahmadian et al. 2024, arXiv 2402.14740, section 2.3",
    advantage="rloo", loss="vanilla", aggregation="token-mean",
    kl={"where": "reward", "kind": "k1", "coef": 0.0},
)  # fmt: skip
async def rloo(step: Step) -> None:
    """REINFORCE with a leave-one-out baseline."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))
