"""On-policy distillation: the reference scores every token that the policy sampled, or says which it would have."""

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


@recipe(
    paper="Agarwal et al. 2023, arXiv 2306.13649, section 3 (forward KL)",
    models=("actor", "reference"),
    advantage="dr_grpo", loss="forward_kl_topk", aggregation="token-mean",
    options={"top_k": 64},
)  # fmt: skip
async def topk_distillation(step: Step) -> None:
    """Forward KL to a teacher's top_k most probable tokens at each place; scores are only watched."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), step.logprobs(samples, top_k=step.options["top_k"]))
