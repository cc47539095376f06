"""Generation and the inference passes of a PPO step on a fixed cluster, one after the other or fused (RLHFuse, arXiv
2409.13221, section 4).

Generation runs on instances of t GPUs, the batch dealt out evenly. When the unfinished samples fall below R_t they go
on together on m instances, those with the most left to do; keys and values of the moved ones cross the network. On the
GPUs of the others reference, reward and critic go over what is finished, batch after batch. Without fusion they go over
everything on all GPUs when the last sample is finished. The weights of reference and reward are there already, or come
from CPU memory (where RLHFuse keeps them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bench.papers.mapping_costs import (
    ALL_REDUCE_S,
    NODE_GPUS,
    Cluster,
    Parallelism,
    Role,
    pass_s,
    usable_bytes,
)
from orchestrator.planner.devices import ModelShape, kv_capacity_tokens
from orchestrator.planner.latency import GenerateCost, generate_prior
from orchestrator.planner.rollout import finish_times_s
from orchestrator.planner.tail import ShardState

Array = npt.NDArray[np.float64]

SLOWER = 0.25
"""BS_max is the batch that makes a decode step so much slower than it is for one sample. ASSUMED: RLHFuse profiles it,
its values are not published."""
PCIE_BYTES_S = 50e9
"""From CPU memory to a GPU: PCIe 5 x16, 80 % of 63 GB/s. ASSUMED share."""


@dataclass(frozen=True)
class Rollout:
    """Seconds from the first decode step."""

    generated_s: float
    end_s: float
    """All samples generated and gone over."""
    kept: int
    """Instances that generate to the end."""


@dataclass(frozen=True)
class System:
    """`states_bytes`: what training leaves on each GPU. `passes`: reference, reward, critic; those that do not train
    are loaded from CPU memory first where `loads`."""

    cluster: Cluster
    gpus: int
    actor: ModelShape
    passes: Sequence[Role]
    states_bytes: float
    prompt_tokens: int
    cap: int
    loads: bool = False

    def generate(self, tensor: int) -> GenerateCost:
        """Of an instance of `tensor` GPUs: the roofline and two all-reduces a layer."""
        cost = generate_prior(self.cluster.gpu, self.actor, tensor)
        return cost if tensor == 1 else replace(cost, step_s=cost.step_s + 2 * self.actor.layers * ALL_REDUCE_S)

    def infer_s(self, samples: int, tokens: int, gpus: int, *, loads: bool) -> float:
        """All passes over so many samples of so many tokens, one pass after the other, each cut as is best for it."""
        return sum(
            min(
                pass_s(role, self.cluster, Parallelism(t, 1, gpus // t), samples, tokens, training=False)
                + (role.model.weight_bytes / t / PCIE_BYTES_S if loads and not role.trains else 0.0)
                for t in _tensors(role.model, usable_bytes(self.cluster.gpu) - self.states_bytes)
            )
            for role in self.passes
        )


def _tensors(model: ModelShape, room: float) -> list[int]:
    """GPUs of a node over which the weights may be cut."""
    return [t for t in (1, 2, 4, 8) if model.weight_bytes / t <= room]


def best_tensor(system: System, lengths: Array) -> int:
    """GPUs of an instance with which the batch is generated soonest (without fusion)."""
    fits = _tensors(system.actor, 0.7 * usable_bytes(system.cluster.gpu))
    return min(fits, key=lambda t: max(float(s.finish_s[-1]) for s in instances(system, lengths, t)))


def instances(system: System, lengths: Array, tensor: int) -> list[ShardState]:
    """What each instance generates, and when it is finished."""
    count = system.gpus // tensor
    cost, room = system.generate(tensor), kv_capacity_tokens(system.cluster.gpu, system.actor, tensor)
    prompts = np.full(len(lengths), float(system.prompt_tokens))
    return [
        ShardState.of(
            prompts[k::count], lengths[k::count], cost, room // (system.prompt_tokens + system.cap),
            float(prompts[k::count].sum()), np.arange(len(lengths))[k::count],
        )
        for k in range(count)
    ]  # fmt: skip


def in_turn(system: System, lengths: Array, tensor: int) -> Rollout:
    """Without fusion."""
    shards = instances(system, lengths, tensor)
    generated_s = max(float(s.finish_s[-1]) for s in shards)
    tokens = round(system.prompt_tokens + float(lengths.mean()))
    infer_s = system.infer_s(len(lengths), tokens, system.gpus, loads=system.loads)
    return Rollout(generated_s, generated_s + infer_s, len(shards))


def fused(system: System, lengths: Array, tensor: int, threshold: float) -> Rollout:
    """With the tail cut when `threshold` (R_t) of the samples are unfinished."""
    shards = instances(system, lengths, tensor)
    every = np.sort(np.concatenate([s.finish_s for s in shards]))
    unfinished = round(threshold * len(every))
    if unfinished < 1:
        return in_turn(system, lengths, tensor)
    cut_s = float(every[-unfinished - 1])
    finish_s, kept = _gathered(system, shards, tensor, cut_s)
    free = system.gpus - kept * tensor
    if not free:
        return in_turn(system, lengths, tensor)
    tokens = round(system.prompt_tokens + float(lengths.mean()))
    now_s, done = cut_s, 0
    while done < len(finish_s):
        now_s = max(now_s, finish_s[done])
        ready = int(np.searchsorted(finish_s, now_s, side="right"))
        now_s += system.infer_s(ready - done, tokens, free, loads=system.loads and not done)
        done = ready
    return Rollout(float(finish_s[-1]), float(now_s), kept)


def saturation(cost: GenerateCost, held_tokens: float) -> int:
    """BS_max: samples of so many tokens that an instance decodes nearly as fast as one."""
    return max(1, int(SLOWER * cost.step_s / (cost.sequence_s + cost.kv_token_s * held_tokens)))


def _gathered(system: System, shards: Sequence[ShardState], tensor: int, cut_s: float) -> tuple[Array, int]:
    """When samples are finished if what is left at `cut_s` goes on on m instances, ascending, and m."""
    finished = [s.finish_s[s.finish_s <= cut_s] for s in shards]
    left = [_left(s, cut_s) for s in shards if s.finish_s[-1] > cut_s]
    left.sort(key=lambda parts: -float(parts[1].sum()))
    cost = system.generate(tensor)
    held = float(sum(parts[0].sum() + parts[1].sum() for parts in left))
    count = sum(len(parts[0]) for parts in left)
    batch, room = saturation(cost, held / count), kv_capacity_tokens(system.cluster.gpu, system.actor, tensor)
    kept = min(len(left), max(-(-count // batch), -(-int(held) // room)))
    together = [list(zip(parts[0], parts[1], strict=True)) for parts in left[:kept]]
    moved_tokens = [0.0] * kept
    for parts in left[kept:]:
        for had, more in zip(parts[0], parts[1], strict=True):
            to = min(range(kept), key=lambda k: len(together[k]))
            together[to].append((had, more))
            moved_tokens[to] += had
    bandwidth = system.cluster.network_bytes_s * tensor / NODE_GPUS
    times = [*finished]
    for group, tokens in zip(together, moved_tokens, strict=True):
        had, more = np.array(sorted(group, key=lambda sample: sample[1])).T
        move_s = tokens * system.actor.kv_bytes_per_token / bandwidth
        times.append(cut_s + move_s + finish_times_s(had, more, cost, max_batch=len(group), prefill_tokens=0.0))
    return np.sort(np.concatenate(times)), kept


def _left(shard: ShardState, time_s: float) -> tuple[Array, Array]:
    """Of the samples unfinished then: tokens held (prompt and response so far), and tokens to come. Progress is linear
    between finishes.
    """
    first = int(np.searchsorted(shard.finish_s, time_s, side="right"))
    before_s, steps = shard.finish_s[first - 1] if first else shard.begin_s, shard.steps
    before = steps[first - 1] if first else 0.0
    share = (time_s - before_s) / max(shard.finish_s[first] - before_s, 1e-12)
    done = before + max(0.0, share) * (steps[first] - before)
    made = np.maximum(0.0, done - shard.starts[first:])
    return shard.prompt_tokens[first:] + made, shard.lengths[first:] - made
