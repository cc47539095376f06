"""On-policy distillation: the reference scores every token that the policy sampled."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Agarwal et al. 2023, arXiv 2306.13649; Lu 2025, On-Policy Distillation",
    models=("actor", "reference"),
    advantage="distillation", loss="importance_sampling", aggregation="token-mean",
)  # fmt: skip
async def distillation(step: Step) -> None:
    """Reverse KL to a teacher (reference.path) as each token's advantage; scores are only watched."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), step.logprobs(samples))
