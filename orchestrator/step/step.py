"""One step's dataflow: what a recipe is written in.

    samples = step.generate()                a stream that grows while replicas generate
    scores = step.reward(samples)            starts on the first finished samples (sample-level fusion)
    reference = step.logprobs(samples)       beside it
    step.train("actor", samples, scores, reference)

Every operation starts at once, in a task of its own, and returns a stream that the task fills. Who waits for whom, and
is woken by what:

    task                 waits for                                              is woken by
    generate   (generate.py)  its calls' events                                 a replica: `samples`, `cut`, `done`
        its tail              fewer unfinished samples than plan.cut_below      the last event that left so few
    reward,    (score.py)     samples for a micro-batch; without plan.overlap   generate: Samples.put, Samples.end
    logprobs, values          for all of them
    train      (train.py)     the end of its samples and of each column         generate, reward, ...: Stream.end
        streamed              the plan's time (clock.reach) and generation's    generate: clock.generated, clock.scaled;
                              replicas (clock.scaled), or so many whole groups  reward, ...: Scores.put
    the recipe   what it awaits itself: a column, or a train task               that task's end
    the loop     the recipe and all tasks                                       the last one's end

All tasks are supervised by the step's task group: a failure ends the stream that its task fills, which wakes whoever
follows it, and cancels the rest. Only references pass through here, never tensors (but see generate.py).
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from functions.base.wire import Json
from orchestrator.job.functions import fused
from orchestrator.job.prompts import PromptSet
from orchestrator.step.context import Context
from orchestrator.step.dataflow import Samples, Scores
from orchestrator.step.generate import Generation
from orchestrator.step.given import put_given
from orchestrator.step.preload import penalty_models
from orchestrator.step.score import Scoring, put_baselines, read_column
from orchestrator.step.train import Training


class Step:
    """A step, as a recipe has it. `prompts` are its batch, `options` the recipe's (and the job's over them)."""

    def __init__(self, context: Context, more_prompts: Callable[[], PromptSet]) -> None:
        self._context, self._more_prompts = context, more_prompts
        self._plan_is_used = False
        self.number, self.prompts, self.options = context.number, context.prompts, context.execution.options

    def generate(
        self, prompts: PromptSet | None = None, *, n: int | None = None, temperature: float | None = None,
        name: str = "gen",
    ) -> Samples:  # fmt: skip
        """`n` samples of each prompt (default: the job's) at `temperature` (0: greedy).

        The step's plan is for the first one that names neither `prompts` nor `n`.
        """
        planned = prompts is None and n is None and not self._plan_is_used
        self._plan_is_used |= planned
        of, count = prompts or self.prompts, self._context.job.rollout.n if n is None else n
        samples = Samples(of.groups, count)
        self._context.fill(samples, Generation(self._context, name, of, count, planned, temperature).run(samples))
        return samples

    def given(self, *columns: str, at_end: bool = False) -> Samples:
        """The responses that the rows of the step's prompts give in `columns`, as samples: that many of each prompt.

        `at_end`: only the place after the last token trains, where a reward model's score is read.
        """
        samples = Samples(self.prompts.groups, len(columns))
        self._context.fill(samples, put_given(self._context, self.prompts, columns, samples, at_end=at_end))
        return samples

    def reward(self, samples: Samples, prompts: PromptSet | None = None, *, name: str = "reward") -> Scores:
        """The scorer's columns ("score" and whatever else it returns) for each sample; where the environment scores its
        episodes, what it said."""
        if self._context.job.reward.score == "environment":
            return samples.environment
        weights = {"policy": "actor"} | ({"model": "reward"} if "reward" in self._context.versions else {})
        scorer = self._context.job.scoring
        return self._columns(samples, name, "reward", "score", scorer, weights, prompts or self.prompts)

    def reference(self, samples: Samples) -> list[Scores]:
        """What a KL penalty wants, where the job has one: log-probabilities of the sampled tokens (penalty_models)."""
        names = {"reference": ("ref_logprobs", "ref"), "actor": ("old_logprobs", "old_log_prob")}
        models = penalty_models(self._context.execution.settings["actor"].kl, self._context.versions)
        return [self.logprobs(samples, model=m, column=names[m][0], name=names[m][1]) for m in models]

    def logprobs(
        self, samples: Samples, *, model: str = "reference", column: str = "ref_logprobs", name: str = "ref",
        top_k: int = 0,
    ) -> Scores:  # fmt: skip
        """A model's log-probabilities of the sampled tokens, by the reference function; and, above 0, those of its
        `top_k` most probable tokens at each place."""
        params: Json = {"temperature": self._context.execution.settings["actor"].temperature, "column": column}
        params |= {"top_k": top_k} if top_k else {}
        return self._columns(samples, name, "reference", "logprobs", params, {"model": model})

    def values(self, samples: Samples, *, model: str = "critic", column: str = "values") -> Scores:
        """The critic's values of the sampled tokens."""
        return self._columns(samples, column, model, "values", {"column": column}, {"model": model})

    def train(
        self, model: str, samples: Samples | Sequence[Samples], *columns: Scores,
        only: Collection[int] | None = None, beside: str | None = None, **settings: Any,
    ) -> asyncio.Task[Json]:  # fmt: skip
        """One train call: publishes the next version of `model` and makes it current when the step ends.

        `only`: the groups to train on (default: all). `beside`: a model that trains on the same, in a call of its own,
        or in this one where `model` is trained by pipelines: in their bubbles (functions/train/fused.py). `settings`
        go over the recipe's for this call.
        """
        rollouts = [samples] if isinstance(samples, Samples) else list(samples)
        if beside is not None and not fused(self._context.job):
            self.train(beside, samples, *columns, only=only)
            beside = None
        training = Training(self._context, model, rollouts, columns, only, settings, beside)
        return self._context.tasks.create_task(training.run())

    def more_prompts(self) -> PromptSet:
        """As many further prompts as the step has, numbered on from them (dynamic sampling)."""
        return self._more_prompts()

    def of_greedy(self, column: str, samples: Samples, greedy: Samples, scores: Scores) -> Scores:
        """Each sample's prompt's greedy score, as the samples' own column `column` (ReMax's baseline)."""
        baselines = Scores()
        self._context.fill(baselines, put_baselines(self._context, column, samples, greedy, scores, baselines))
        return baselines

    async def column(self, name: str, samples: Samples, *columns: Scores) -> dict[int, list[float]]:
        """A per-sample column, by group: for recipes that decide on it (dynamic sampling, validation)."""
        return await read_column(self._context, name, samples, columns)

    def _columns(
        self, samples: Samples, name: str, function: str, operation: str, params: Json, weights: Mapping[str, str],
        rows: PromptSet | None = None,
    ) -> Scores:  # fmt: skip
        scores = Scores()
        scoring = Scoring(self._context, name, function, operation, params, weights, rows)
        self._context.fill(scores, scoring.run(samples, scores))
        return scores
