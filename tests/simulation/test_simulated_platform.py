"""The simulated platform as the loop calls it: times by hand, one call a replica, pools, cuts, losses."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from functions.base.samples import Columns, Finish, SampleBatch
from functions.base.wire import Call, Event, Hint, Load, Ref, Version, hint_key
from orchestrator.planner.latency import GenerateCost, WorkCost
from orchestrator.platforms.base import CallLost, FunctionSpec, PlatformError
from orchestrator.simulation.clock import Deadlock, run
from orchestrator.simulation.functions import Generate, Model, Work
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.platform import Pool, SimulatedPlatform

POLICY = {"policy": Version("actor", 0)}


class Table:
    """Lengths by hand: [group][index]."""

    def __init__(self, *rows: Sequence[int]) -> None:
        self.rows = rows

    def length(self, step: int, group: int, index: int, prompt: npt.NDArray[np.int32]) -> int:
        return self.rows[group][index]


def world(
    lengths: Table,
    *,
    gpus: int = 1,
    pool: Pool | None = None,
    load_s: float = 0.0,
    delta_s: float = 0.0,
    slots: int = 64,
    moved_token_s: float | None = None,
) -> tuple[SimulatedPlatform, MemoryExchange, list[FunctionSpec]]:
    exchange = MemoryExchange(lambda: asyncio.get_running_loop().time())
    cost = GenerateCost(call_s=0.0, prefill_token_s=0.01, step_s=1.0, sequence_s=0.0, kv_token_s=0.0)
    cost = replace(cost, moved_token_s=moved_token_s)
    models: dict[str, Model] = {
        "generate": Generate(cost, lengths, start_s=10.0, load_s=load_s, delta_s=delta_s, slots=slots),
        "reward": Work("reward", WorkCost(1.0, 0.5, 0.0), start_s=2.0),
        "train": Work("train", WorkCost(0.0, 0.0, 0.1), start_s=4.0),
    }
    specs = [
        FunctionSpec("generate", "generate", max_replicas=4, gpus=gpus),
        FunctionSpec("reward", "reward", max_replicas=4, gpus=0),
        FunctionSpec("train", "train", max_replicas=1, gpus=gpus),
    ]
    return SimulatedPlatform(models, exchange, pool=pool), exchange, specs


def generate_call(exchange: MemoryExchange, batch: SampleBatch, name: str = "c", cap: int = 100) -> Call:
    ref = exchange.put(f"batches/{name}", batch.encode())
    params = {"max_response_length": cap, "chunk": 1}
    return Call(f"s000001.generate.{name}", "generate", {"samples": [ref]}, POLICY, params, 1)


async def collect(platform: SimulatedPlatform, function: str, call: Call) -> list[tuple[float, Event]]:
    clock = asyncio.get_running_loop().time
    return [(clock(), event) async for event in platform.call(function, call) if event.kind != "progress"]


def prompts(count: int, n: int) -> SampleBatch:
    return SampleBatch.of_prompts([[g] * 10 for g in range(count)], samples_per_prompt=n, version=0)


def test_a_cold_call_by_hand() -> None:
    platform, exchange, specs = world(Table([3, 5], [200, 5]), load_s=2.0)

    async def main() -> list[tuple[float, Event]]:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        return await collect(platform, "generate", generate_call(exchange, prompts(2, 2)))

    events = run(main())
    # cold start 10, load 2, prefill of two prompts of 10 tokens 0.2; then a second a step; cap 100.
    assert [(t, e.kind, list(e.data.get("length", ()))) for t, e in events] == [
        (10.0, "started", []),
        (pytest.approx(15.2), "samples", [3]),
        (pytest.approx(17.2), "samples", [5, 5]),
        (pytest.approx(112.2), "samples", [100]),
        (pytest.approx(112.2), "done", []),
    ]
    stats = events[-1][1].data
    assert (stats["prefill_tokens"], stats["shared_tokens"], stats["decode_tokens"], stats["decode_steps"]) == (
        20, 20, 113, 100,
    )  # fmt: skip
    assert stats["decode_s"] == pytest.approx(100.0)
    last = SampleBatch.decode(exchange.get(cast(Ref, events[3][1].ref)))
    assert (last.group.tolist(), last.index.tolist(), last.finish.tolist()) == ([1], [0], [Finish.LENGTH])


def test_a_replica_loads_what_its_hint_names_as_it_starts() -> None:
    """Up at 10 s, it loads version 0 until 12 s; a call for version 1 comes at 11 s: it waits, and takes the delta."""
    platform, exchange, specs = world(Table([3]), load_s=2.0, delta_s=0.5)
    hint = Hint(1, [Load("generate", POLICY)])
    exchange.put(hint_key("generate"), json.dumps(hint.to_json()).encode())

    async def main() -> list[tuple[float, Event]]:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        await asyncio.sleep(11.0)
        call = replace(generate_call(exchange, prompts(1, 1)), weights={"policy": Version("actor", 1, "train")})
        again = replace(call, id="s000001.generate.d")
        return await collect(platform, "generate", call) + await collect(platform, "generate", again)

    events = run(main())
    assert [(t, e.kind) for t, e in events if e.kind != "samples"] == [
        (11.0, "started"), (pytest.approx(11 + 1.0 + 0.5 + 0.1 + 3), "done"),
        (pytest.approx(15.6), "started"), (pytest.approx(15.6 + 0.1 + 3), "done"),
    ]  # fmt: skip
    told = [{k: e.data.get(k) for k in ("load_s", "loaded_ahead_s")} for _, e in events if e.kind == "done"]
    assert told == [{"load_s": 1.5, "loaded_ahead_s": 1.0}, {"load_s": 0.0, "loaded_ahead_s": None}]


def test_a_cut_writes_keys_and_values_before_it_hands_over() -> None:
    """10 prompt tokens and 4 of the response at 0.25 s a token, there and here."""
    platform, exchange, specs = world(Table([20]), moved_token_s=0.25)

    async def main() -> list[tuple[float, Event]]:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        call = generate_call(exchange, prompts(1, 1))
        asyncio.get_running_loop().call_at(14.1, lambda: exchange.put(call.cut_key, b"cut"))
        events = await collect(platform, "generate", call)
        rest = Call("s000001.tail", "generate", {"samples": [cast(Ref, events[1][1].ref)]}, POLICY, call.params, 1)
        return events + await collect(platform, "generate", rest)

    events = run(main())
    assert [(t, e.kind) for t, e in events] == [
        (10.0, "started"), (pytest.approx(14.1 + 3.5), "cut"), (pytest.approx(17.6), "done"),
        (pytest.approx(17.6), "started"), (pytest.approx(17.6 + 3.5 + 16), "samples"), (pytest.approx(37.1), "done"),
    ]  # fmt: skip
    assert events[2][1].data["decode_s"] == pytest.approx(4.0, rel=0.03)  # writing is no decoding
    assert (events[-1][1].data["prefill_tokens"], events[-1][1].data["moved_tokens"]) == (0, 14)


def test_slots_are_refilled() -> None:
    platform, exchange, specs = world(Table([4, 2, 3]), slots=2)

    async def main() -> list[tuple[float, Event]]:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        return await collect(platform, "generate", generate_call(exchange, prompts(1, 3)))

    # Two slots: lengths 4 and 2 first, then 3 in the place of 2: done at steps 2, 4, 5 after 10 + 0.1 s.
    times = [t for t, e in run(main()) if e.kind == "samples"]
    assert times == [pytest.approx(12.1), pytest.approx(14.1), pytest.approx(15.1)]


def test_a_cut_hands_over_what_is_unfinished_and_it_goes_on_elsewhere() -> None:
    platform, exchange, specs = world(Table([5, 20]))

    async def main() -> tuple[list[tuple[float, Event]], list[tuple[float, Event]]]:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        call = generate_call(exchange, prompts(1, 2))
        task = asyncio.create_task(collect(platform, "generate", call))
        await asyncio.sleep(17.5)  # 7.4 steps after prefill's end at 10.1
        exchange.put(call.cut_key, b"cut")
        first = await task
        left = cast(Ref, first[-2][1].ref)
        params = {"max_response_length": 100, "chunk": 1}
        again = Call("s000001.generate.d", "generate", {"samples": [left]}, POLICY, params, 1)
        return first, await collect(platform, "generate", again)

    first, second = run(main())
    assert [(e.kind, list(e.data.get("length", ()))) for _, e in first] == [
        ("started", []), ("samples", [5]), ("cut", [7]), ("done", []),
    ]  # fmt: skip
    # The replica was warm: prompt and the 7 tokens computed again (0.17 s), 13 steps to go.
    assert second[0][0] == pytest.approx(17.5)
    assert second[1][0] == pytest.approx(17.5 + 0.17 + 13)
    assert second[1][1].data["length"] == [20]


def test_replicas_are_paid_from_start_to_gone_and_busy_ones_finish_first() -> None:
    platform, exchange, specs = world(Table([5], [8]))

    async def main() -> None:
        await platform.deploy(specs)
        await platform.scale("generate", 2)
        calls = [
            collect(platform, "generate", generate_call(exchange, prompts(2, 1).select([k]), f"c{k}")) for k in range(2)
        ]
        tasks = [asyncio.create_task(c) for c in calls]
        await asyncio.sleep(12)
        await platform.scale("generate", 0)
        assert [r.state for r in platform.replicas()] == ["draining", "draining"]
        await asyncio.gather(*tasks)
        assert platform.replicas() == []
        await platform.close()
        await platform.close()

    run(main())
    lives = [(u.started_s, u.stopped_s or 0.0, u.busy_s) for u in platform.usage()]
    np.testing.assert_allclose(lives, [(0.0, 15.1, 5.1), (0.0, 18.1, 8.1)])
    assert platform.gpu_s() == pytest.approx(33.2)


def test_a_pool_makes_replicas_wait_for_gpus_and_does_not_charge_for_it() -> None:
    platform, exchange, specs = world(Table([5], [8]), gpus=2, pool=Pool(3))

    async def main() -> list[tuple[float, Event]]:
        await platform.deploy(specs)
        await platform.scale("generate", 2)
        calls = [
            collect(platform, "generate", generate_call(exchange, prompts(2, 1).select([k]), f"c{k}")) for k in range(2)
        ]
        tasks = [asyncio.create_task(c) for c in calls]
        await asyncio.sleep(11)
        await platform.scale("generate", 1)  # the starting one goes
        await platform.scale("generate", 2)
        first = await tasks[0]
        await platform.scale("generate", 1)
        await tasks[1]
        await platform.close()
        return first

    run(main())
    # One replica at a time fits: the second call takes the first replica when that is idle again.
    assert len(platform.usage()) == 1
    assert platform.gpu_s() == pytest.approx(2 * (15.1 + 8.1))


def test_colocated_functions_take_turns_and_the_pool_is_paid_for_the_whole_time() -> None:
    platform, exchange, specs = world(Table([5]), gpus=2, pool=Pool(2, colocated=True))

    async def main() -> tuple[list[tuple[float, Event]], list[tuple[float, Event]]]:
        await platform.deploy(specs)
        for name in ("generate", "train"):
            await platform.scale(name, 1)
        made = SampleBatch.decode(prompts(1, 1).encode())
        ref = exchange.put("batches/t", made.encode())
        train = Call("s000001.train.t", "train", {"samples": [ref]}, POLICY, {"model": "actor"}, 1)
        both = await asyncio.gather(
            collect(platform, "generate", generate_call(exchange, prompts(1, 1))), collect(platform, "train", train)
        )
        await platform.close()
        return both[0], both[1]

    generated, trained = run(main())
    # train is warm at 4 s and has the GPUs for 1 s (10 tokens); generate is warm at 10 s.
    np.testing.assert_allclose([trained[0][0], trained[-1][0]], [4.0, 5.0])
    assert generated[-1][0] == pytest.approx(15.1)
    assert platform.gpu_s() == pytest.approx(2 * 15.1)


def test_train_publishes_the_same_weights_whatever_the_order_of_samples() -> None:
    from functions.weights.manifest import read_manifest

    digests = []
    for order in ([0, 1, 2], [2, 0, 1]):
        platform, exchange, specs = world(Table([5]))
        batch = prompts(3, 1).select(order)

        async def main(
            platform: SimulatedPlatform = platform, exchange: MemoryExchange = exchange,
            specs: list[FunctionSpec] = specs, batch: SampleBatch = batch, name: str = f"t{order[0]}",
        ) -> str:  # fmt: skip
            await platform.deploy(specs)
            await platform.scale("train", 1)
            ref = exchange.put("batches/t", batch.encode())
            call = Call(name, "train", {"samples": [ref]}, POLICY, {"model": "actor"}, 1)
            done = (await collect(platform, "train", call))[-1][1]
            return read_manifest(exchange, Version.from_json(done.data["version"])).tensors[0].hash

        digests.append(run(main()))
    assert digests[0] == digests[1]


def test_reward_columns_join_their_samples() -> None:
    platform, exchange, specs = world(Table([5]))

    async def main() -> tuple[float, Columns]:
        await platform.deploy(specs)
        await platform.scale("reward", 1)
        ref = exchange.put("batches/r", prompts(2, 2).encode())
        events = await collect(platform, "reward", Call("r", "score", {"samples": [ref]}, {}, {}, 1))
        return events[-1][0], Columns.decode(exchange.get(cast(Ref, events[-1][1].ref)))

    at_s, columns = run(main())
    assert at_s == pytest.approx(2.0 + 1.0 + 4 * 0.5)
    assert len(set(columns.sample["score"].tolist())) == 4


def test_a_killed_replica_loses_its_call_and_is_replaced() -> None:
    platform, exchange, specs = world(Table([50]))

    async def main() -> None:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        task = asyncio.create_task(collect(platform, "generate", generate_call(exchange, prompts(1, 1))))
        await asyncio.sleep(20)
        platform.kill(platform.replicas()[0].name)
        with pytest.raises(CallLost, match=r"generate-0 is gone, with call s000001\.generate\.c"):
            await task
        assert [r.state for r in platform.replicas()] == ["starting"]
        await platform.close()

    run(main())
    assert [(u.started_s, u.stopped_s) for u in platform.usage()] == [(0.0, 20.0), (20.0, 20.0)]


def test_heartbeats_come_at_least_every_five_seconds() -> None:
    platform, exchange, specs = world(Table([50]), load_s=12.0)

    async def main() -> list[float]:
        await platform.deploy(specs)
        await platform.scale("generate", 1)
        clock = asyncio.get_running_loop().time
        call = generate_call(exchange, prompts(1, 1))
        return [clock() async for _ in platform.call("generate", call)]

    times = run(main())
    assert max(b - a for a, b in itertools.pairwise(times)) <= 5.0


def test_bad_requests() -> None:
    platform, _, specs = world(Table([50]), gpus=8, pool=Pool(4))

    async def main() -> None:
        with pytest.raises(PlatformError, match="generate: a replica needs 8 GPUs, the pool has 4"):
            await platform.deploy(specs)
        with pytest.raises(PlatformError, match="'critic' has no model"):
            await platform.deploy([FunctionSpec("critic", "reference")])

    run(main())


def test_a_dead_simulation_says_so() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="no timer is set"):
        run(main())


def test_what_parks_comes_back_with_its_versions_and_leaves_its_gpus_a_little_later() -> None:
    """10 s from nothing, 3 s from parked; GPUs are free, and paid for, until 2 s after a replica is let go."""
    platform, exchange, specs = world(Table([3, 3]), load_s=5.0, delta_s=1.0, pool=Pool(1))
    model = platform._models["generate"]
    platform._models = dict(platform._models) | {"generate": replace(model, back_s=3.0, leave_s=2.0)}

    async def one(name: str, number: int) -> float:
        begin_s = asyncio.get_running_loop().time()
        call = generate_call(exchange, prompts(1, 2), name)
        await platform.scale("generate", 1)
        await collect(platform, "generate", replace(call, weights={"policy": Version("actor", number)}))
        await platform.scale("generate", 0)
        return asyncio.get_running_loop().time() - begin_s

    async def main() -> None:
        await platform.deploy(specs)
        assert await one("first", 0) == pytest.approx(10 + 5 + 3.1)
        assert platform.gpu_s() == pytest.approx(18.1)
        await asyncio.sleep(5.0)
        assert platform.gpu_s() == pytest.approx(20.1)
        assert await one("again", 0) == pytest.approx(3 + 3.1)
        assert await one("next", 1) == pytest.approx(2 + 3 + 1 + 3.1)  # its GPU is free 2 s later
        await platform.close()
        assert platform.gpu_s() == pytest.approx(20.1 + 8.1 + 7.1)

    run(main())


def test_in_turns_a_call_that_needs_several_gpus_is_not_starved_by_later_stages() -> None:
    """Scores keep both GPUs busy, one or the other: 2.0, 3.5, 5.0 and 1.5, 3.0, 4.5. The call of generate that comes at
    1.0 gets both when they are free next."""
    platform, exchange, specs = world(Table([3]), pool=Pool(2), gpus=2)
    specs[1] = replace(specs[1], gpus=1)

    async def main() -> None:
        await platform.deploy(specs)
        platform.take_turns(platform._models, 2)
        for name, count in (("generate", 1), ("reward", 2)):
            await platform.scale(name, count)
        await asyncio.sleep(20.0)
        refs = [exchange.put(f"batches/{n}", prompts(1, n).encode()) for n in (2, 1)]
        calls = [Call(f"s000001.reward.{k}", "reward", {"samples": [refs[k > 0]]}, {}, {}, 1) for k in range(8)]
        async with asyncio.TaskGroup() as tasks:
            scored = [tasks.create_task(collect(platform, "reward", call)) for call in calls]
            await asyncio.sleep(1.0)
            made = tasks.create_task(collect(platform, "generate", generate_call(exchange, prompts(1, 1))))
        assert made.result()[0][0] == pytest.approx(20.0 + 2.0)
        assert all(task.result()[-1][1].kind == "done" for task in scored)
        await platform.close()

    run(main())


def test_what_is_held_for_turns_is_paid_for_and_calls_wait_for_each_other() -> None:
    """Two functions on one GPU: both have replicas, one call at a time; fewer GPUs can be held; apart again,
    only what is up is paid for."""
    platform, exchange, specs = world(Table([3, 3]), pool=Pool(4), gpus=4)

    async def main() -> None:
        await platform.deploy(specs)
        await asyncio.sleep(7.0)
        assert platform.gpu_s() == 0.0
        platform.take_turns(platform._models, 4)
        for name in ("generate", "train"):
            await platform.scale(name, 1)
        await asyncio.sleep(10.0)
        assert platform.gpu_s() == pytest.approx(4 * 10)
        ref = exchange.put("batches/t", prompts(1, 2).encode())
        train = Call("s000001.train.t", "train", {"samples": [ref]}, POLICY, {"model": "actor"}, 1)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(collect(platform, "generate", generate_call(exchange, prompts(1, 2))))
            await asyncio.sleep(0)
            second = tasks.create_task(collect(platform, "train", train))
        assert first.result()[-1][0] == pytest.approx(17 + 3.1)
        assert second.result()[0][0] == pytest.approx(17 + 3.1)
        platform.take_turns(platform._models, 3)
        before = platform.gpu_s()
        await asyncio.sleep(10.0)
        assert platform.gpu_s() - before == pytest.approx(3 * 10)
        platform.take_turns(platform._models, 0)
        for name in ("generate", "train"):
            await platform.scale(name, 0)
        before = platform.gpu_s()
        await asyncio.sleep(10.0)
        assert platform.gpu_s() == before
        await platform.close()

    run(main())
