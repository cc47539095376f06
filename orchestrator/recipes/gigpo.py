"""GiGPO: advantages of episodes and, within them, of turns that began in the same state."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Feng et al. 2025, arXiv 2505.10978, section 4",
    advantage="gigpo", loss="vanilla", aggregation="token-mean",
    kl={"where": "loss", "kind": "k3", "coef": 0.0},
)  # fmt: skip
async def gigpo(step: Step) -> None:
    """GRPO for agents: each turn also answers for what followed it, among turns from the same state."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))
