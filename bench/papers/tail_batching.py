"""Tail batching (RollPacker, arXiv 2509.21009) on GPUs that are held for the whole job.

    short round   ETA P prompts with ETA n responses each begin; it ends as soon as P of them have n: these are trained
                  on. What is unfinished is dropped, and the prompts that were too late wait
    long round    as soon as P prompts wait: they, with n responses each, to the longest

Which samples are trained on depends on how long they take (of each prompt the shortest, long prompts later), so it is
no Policy of a loop in which every policy meets the same work: docs/decisions/0014-tail-batching.md. What a round
generates is worked out here; all that follows is the loop's, under `serverful`, with the samples that were kept.
RollPacker's other parts (tensor parallelism that adapts, rewards, streamed training) are left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from orchestrator.job.data import Cursor
from orchestrator.planner.static import balance
from orchestrator.session.loop import StepResult
from orchestrator.simulation.baselines import SERVERFUL
from orchestrator.simulation.decoding import Item, schedule
from orchestrator.simulation.functions import Generate
from orchestrator.simulation.job import simulate
from orchestrator.simulation.scenario import Scenario

NAME = "tail-batching"
ETA = 1.25
"""RollPacker's, of prompts and of responses."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """What was kept of one."""

    long: bool
    prompts: Sequence[int]
    """prompt_id of each group."""
    lengths: Sequence[Sequence[int]]
    """Of the responses, by group."""
    generated_s: float
    """From the round's start."""


@dataclass(frozen=True)
class Rounds:
    """A simulated job."""

    rounds: Sequence[Round]
    step_s: Sequence[float]
    total_gpu_s: float
    policy: str = NAME


@dataclass(frozen=True)
class Kept:
    """The lengths of what was kept, by (step, group, index)."""

    rounds: Sequence[Round]

    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        return self.rounds[step - 1].lengths[group][index]


def tail_batching(scenario: Scenario, *, eta: float = ETA) -> Rounds:
    """`scenario.steps` rounds. Raises ValueError where the scenario's lengths are a trace: it has none of the responses
    that are begun beyond what is wanted."""
    rounds = list(_rounds(scenario, eta))
    outcome = simulate(replace(scenario, lengths=Kept(rounds)), SERVERFUL)
    rest_s = [step.stop_s - _generated_s(step) for step in outcome.plans]
    step_s = [round_.generated_s + after_s for round_, after_s in zip(rounds, rest_s, strict=True)]
    return Rounds(rounds, step_s, scenario.gpus * sum(step_s))


def _generated_s(step: StepResult) -> float:
    """When generation ended in the loop."""
    return max(call.stop_s for call in step.report.calls if call.function == "generate")


def _rounds(scenario: Scenario, eta: float) -> Iterator[Round]:
    source, cursor = scenario.prompts(), Cursor.start(scenario.seed)
    wanted, n = scenario.prompts_per_step, scenario.samples_per_prompt
    waiting: list[tuple[int, list[int]]] = []
    seen: dict[int, float] = {}
    for step in range(1, scenario.steps + 1):
        if long := len(waiting) >= wanted:
            prompts, waiting = waiting[:wanted], waiting[wanted:]
        else:
            drawn, cursor = source.draw(cursor, math.ceil(eta * wanted), first_group=0)
            prompts = [(row["prompt_id"], list(tokens)) for row, tokens in zip(drawn.rows, drawn.tokens, strict=True)]
        each = n if long or n == 1 else math.ceil(eta * n)
        lengths, finish_s = _generated(scenario, step, prompts, each, seen)
        fastest = np.argsort(finish_s, axis=1, kind="stable")[:, :n]
        whole_s = np.take_along_axis(finish_s, fastest[:, -1:], axis=1)[:, 0]
        kept = np.argsort(whole_s, kind="stable")[:wanted]
        late = sorted(set(range(len(prompts))) - set(kept.tolist()))
        waiting += [prompts[row] for row in late]
        of = np.take_along_axis(lengths, fastest, axis=1)
        seen |= {prompts[row][0]: float(of[row].mean()) for row in kept.tolist()}
        numbers = [prompts[row][0] for row in kept.tolist()]
        yield Round(long, numbers, of[kept].tolist(), float(whole_s[kept].max()))


def _generated(
    scenario: Scenario, step: int, prompts: Sequence[tuple[int, list[int]]], n: int, seen: Mapping[int, float]
) -> tuple[npt.NDArray[np.int64], Array]:
    """Lengths of n responses to each prompt, and when they are finished, all prompts dealt to all replicas by the
    lengths seen last. [P, n] each"""
    model = scenario.models(SERVERFUL)["generate"]
    assert isinstance(model, Generate), "generate generates"
    cap = scenario.max_response_length
    rows = [np.array(tokens, np.int32) for _, tokens in prompts]
    lengths = np.array(
        [[min(cap, scenario.lengths.length(step, g, i, row)) for i in range(n)] for g, row in enumerate(rows)], np.int64
    )
    finish_s, typical = np.zeros(lengths.shape), float(np.mean(list(seen.values()))) if seen else 1.0
    for shard in balance([seen.get(number, typical) for number, _ in prompts], scenario.gpus // scenario.generate_gpus):
        items = [Item(g, len(rows[g]), 0, int(lengths[g, i])) for g in shard for i in range(n)]
        plan = schedule(
            items, model.cost, slots=model.slots, kv_tokens=model.kv_tokens, head_tokens=scenario.head_tokens,
            share_prefixes=model.share_prefixes,
        )  # fmt: skip
        finish_s[shard] = model.load_s + plan.finish_s.reshape(len(shard), n)
    return lengths, finish_s
