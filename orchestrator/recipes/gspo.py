"""GSPO: importance ratios and clipping of whole sequences."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Zheng et al. 2025, arXiv 2507.18071, section 4",
    advantage="grpo", loss="gspo", aggregation="seq-mean-token-mean",
    kl={"where": "loss", "kind": "k3", "coef": 0.0},
)  # fmt: skip
async def gspo(step: Step) -> None:
    """GRPO's advantages with a sequence's ratio in place of its tokens'."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))
