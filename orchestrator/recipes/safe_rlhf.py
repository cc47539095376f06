"""Safe-RLHF (PPO-Lagrangian): as helpful as possible while the mean cost stays under a limit."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Dai et al. 2023, arXiv 2310.12773, section 3.3",
    models=("actor", "critic", "cost-critic"),
    advantage="gae", loss="vanilla", aggregation="token-mean",
    kl={"where": "reward", "kind": "k1", "coef": 0.0},
    cost={"limit": 0.0, "lr": 0.1},
)  # fmt: skip
async def safe_rlhf(step: Step) -> None:
    """PPO on reward minus a learned multiple of cost; the scorer returns "score" and "cost"."""
    samples = step.generate()
    columns = [step.reward(samples), step.values(samples), *step.reference(samples)]
    costs = step.values(samples, model="cost-critic", column="cost_values")
    step.train("critic", samples, *columns, cost=None)
    step.train("cost-critic", samples, *columns, costs, cost=None, score={"column": "cost"}, values="cost_values")
    step.train("actor", samples, *columns, costs)
