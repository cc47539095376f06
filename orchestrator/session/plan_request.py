"""A step's prompts and a job's limits, as the planner is asked about them."""

from __future__ import annotations

from collections.abc import Mapping

from functions.call.train_params import TrainParams
from orchestrator.job.config import JobConfig
from orchestrator.job.environment_config import environment_of
from orchestrator.job.prompts import PromptSet
from orchestrator.planner.base import FunctionLimits, Prompt, StepRequest
from orchestrator.recipes.settings import streamed_functions


def plan_request(
    job: JobConfig, number: int, prompts: PromptSet, limits: Mapping[str, FunctionLimits],
    settings: Mapping[str, TrainParams],
) -> StepRequest:  # fmt: skip
    """Of step `number`. `settings`: what the train calls of each model get."""
    return StepRequest(
        step=number,
        prompts=prompts_of(prompts, job),
        samples_per_prompt=job.rollout.n,
        max_response_length=job.rollout.max_response_length,
        functions=limits,
        streamed=streamed_functions(settings, limits, deterministic=job.deterministic),
    )


def prompts_of(drawn: PromptSet, job: JobConfig) -> list[Prompt]:
    """Where rows name their environments, lengths are learned for each of them."""
    found = []
    for group, tokens, row in zip(drawn.groups, drawn.tokens, drawn.rows, strict=True):
        environment = environment_of(row, job.environment)
        source = f"{row['data_source']}/{environment}" if environment else row["data_source"]
        found.append(Prompt(group, row["prompt_id"], tuple(tokens), source, environment))
    return found
