"""GRPO and Dr.GRPO: a prompt's other samples are its baseline; no critic."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Shao et al. 2024, arXiv 2402.03300, section 4.1",
    advantage="grpo", loss="vanilla", aggregation="seq-mean-token-mean",
    kl={"where": "loss", "kind": "k3", "coef": 0.0},
)  # fmt: skip
async def grpo(step: Step) -> None:
    """Group-relative advantages, each response weighs the same."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))


@recipe(
    paper="Liu et al. 2025, arXiv 2503.20783, section 3",
    advantage="dr_grpo", loss="vanilla", aggregation="seq-mean-token-sum-norm",
    kl={"where": "loss", "kind": "k3", "coef": 0.0},
)  # fmt: skip
async def dr_grpo(step: Step) -> None:
    """GRPO without its two biases: no division by the group's deviation, none by the response's length."""
    samples = step.generate()
    step.train("actor", samples, step.reward(samples), *step.reference(samples))
