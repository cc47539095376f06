"""Before RL: learning from responses that a data set gives. No generation and no reward; [data] names the rows."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Ouyang et al. 2022, arXiv 2203.02155, section 3.5 (SFT)",
    advantage="sft", loss="gpg", aggregation="token-mean", max_rollout_logprob_diff="off",
    given=("completion",),
)  # fmt: skip
async def sft(step: Step) -> None:
    """Supervised fine-tuning: the likelihood of each row's `completion`."""
    step.train("actor", step.given("completion"))


@recipe(
    paper="Rafailov et al. 2023, arXiv 2305.18290",
    models=("actor", "reference"),
    advantage="dpo", loss="gpg", aggregation="seq-mean-token-sum", max_rollout_logprob_diff="off",
    given=("chosen", "rejected"),
)  # fmt: skip
async def dpo(step: Step) -> None:
    """Direct preference optimisation on each row's `chosen` and `rejected`, against the policy that it starts from."""
    pairs = step.given("chosen", "rejected")
    step.train("actor", pairs, step.logprobs(pairs))


@recipe(
    paper="Ouyang et al. 2022, arXiv 2203.02155, section 3.5 (RM)",
    models=("actor", "critic"),
    advantage="bradley_terry", loss="gpg", aggregation="seq-mean-token-sum", max_rollout_logprob_diff="off",
    given=("chosen", "rejected"), product="critic",
)  # fmt: skip
async def reward_model(step: Step) -> None:
    """A reward model from each row's `chosen` and `rejected`, for score = "model"; [critic] says how it is trained."""
    step.train("critic", step.given("chosen", "rejected", at_end=True))
