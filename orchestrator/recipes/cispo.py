"""CISPO: the importance weight is clipped, never the token's gradient."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="MiniMax 2025, arXiv 2506.13585, section 3.1",
    advantage="grpo", loss="cispo", aggregation="token-mean",
    kl={"where": "loss", "kind": "k3", "coef": 0.0},
)  # fmt: skip
async def cispo(step: Step) -> None:
    """GRPO's advantages; every token keeps its gradient, its weight is bounded."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))
