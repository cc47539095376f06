"""PPO: a critic and generalized advantage estimation."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Schulman et al. 2017, arXiv 1707.06347; Ouyang et al. 2022, arXiv 2203.02155",
    models=("actor", "critic"),
    advantage="gae", loss="vanilla", aggregation="token-mean",
    kl={"where": "reward", "kind": "k1", "coef": 0.0},
)  # fmt: skip
async def ppo(step: Step) -> None:
    """Clipped policy steps on advantages that a critic estimates."""
    samples = step.generate()
    columns = [step.reward(samples), step.values(samples), *step.reference(samples)]
    step.train("actor", samples, *columns, beside="critic")
