"""DAPO: clip-higher, dynamic sampling, overlong shaping, token-mean."""

from orchestrator.recipes.base import recipe
from orchestrator.step.step import Step


@recipe(
    paper="Yu et al. 2025, arXiv 2503.14476, section 3",
    advantage="grpo", loss="vanilla", aggregation="token-mean", loss_options={"clip_low": 0.2, "clip_high": 0.28},
    options={"max_rounds": 3},
)  # fmt: skip
async def dapo(step: Step) -> None:
    """Prompts that all samples solve, or none, teach nothing: others are drawn until the batch is full."""
    samples, scores = step.generate(), []
    scores.append(step.reward(samples))
    rounds, kept = [samples], informative(await step.column("score", samples, *scores))
    while len(kept) < len(step.prompts.tokens) and len(rounds) < step.options["max_rounds"]:
        prompts = step.more_prompts()
        rounds.append(step.generate(prompts, name=f"gen{len(rounds)}"))
        scores.append(step.reward(rounds[-1], prompts))
        kept += informative(await step.column("score", rounds[-1], scores[-1]))
    step.train("actor", rounds, *scores, only=kept[: len(step.prompts.tokens)])


def informative(scores: dict[int, list[float]]) -> list[int]:
    """Groups whose scores are not all equal."""
    return [group for group, values in scores.items() if len(set(values)) > 1]
