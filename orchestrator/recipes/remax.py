"""ReMax: the greedy response's score is the baseline. One extra generation and no critic."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Li et al. 2024, arXiv 2310.10505, section 4",
    advantage="remax", loss="vanilla", aggregation="token-mean",
    kl={"where": "reward", "kind": "k1", "coef": 0.0},
)  # fmt: skip
async def remax(step: Step) -> None:
    """REINFORCE against the score of the greedy response."""
    samples = step.generate()
    greedy = step.generate(n=1, temperature=0.0, name="baseline")
    baselines = step.of_greedy("baseline", samples, greedy, step.reward(greedy, name="baseline_reward"))
    step.train("actor", samples, step.reward(samples), baselines, *step.reference(samples))
