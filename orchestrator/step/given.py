"""Responses that a data set gives, as samples: what stands in the place of a generation before RL."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from functions.base.samples import Finish, Ragged, SampleBatch
from orchestrator.job.prompts import PromptSet
from orchestrator.step.context import Context
from orchestrator.step.dataflow import Finished, Samples, lengths_of


async def put_given(
    context: Context, prompts: PromptSet, columns: Sequence[str], samples: Samples, *, at_end: bool
) -> None:
    """One batch of all of them. `at_end`: a token is appended that alone trains, so that the value before it is the one
    at the response's last token."""
    rows = [response for responses in prompts.given(columns) for response in responses]
    rows = [[*row, row[-1]] for row in rows] if at_end else rows
    begun = SampleBatch.of_prompts(
        prompts.tokens, samples_per_prompt=len(columns), version=context.versions["actor"].number,
        first_group=prompts.first_group,
    )  # fmt: skip
    masks = [[0.0] * (len(row) - 1) + [1.0] if at_end else [1.0] * len(row) for row in rows]
    batch = replace(
        begun, responses=Ragged.from_rows(rows, np.int32), finish=np.full(len(rows), Finish.STOP, np.int32),
        mask=np.concatenate(masks).astype(np.float32), logprobs=np.zeros(sum(map(len, rows)), np.float32),
    )  # fmt: skip
    item = Finished(
        await context.put(batch.encode()), batch.group.tolist(), batch.index.tolist(), [len(row) for row in rows]
    )
    samples.put(item)
    context.report.lengths |= lengths_of([item])
    context.report.tokens += sum(map(len, rows)) + sum(map(len, prompts.tokens)) * len(columns)
