"""A scenario under a policy: the real loop, planner, fleet and invoker, on the simulated platform in virtual time."""

import asyncio
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from functions.base.wire import Json
from functions.weights.files import encode_header
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.calls.fleet import Fleet
from orchestrator.calls.invoke import Invoker
from orchestrator.job.config import JobConfig, parse_job
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import StepPlan
from orchestrator.planner.policies import TURNS, Policy
from orchestrator.planner.scaling import Goal
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.recipes import find_recipe
from orchestrator.recipes.settings import train_settings
from orchestrator.run.journal import Journal
from orchestrator.run.ledger import Cost
from orchestrator.session.loop import Loop, StepResult
from orchestrator.simulation.clock import run
from orchestrator.simulation.functions import Model
from orchestrator.simulation.lengths import Turns
from orchestrator.simulation.memory import MemoryExchange
from orchestrator.simulation.platform import Pool, SimulatedPlatform
from orchestrator.simulation.scenario import Scenario
from orchestrator.step.dataflow import StepReport


@dataclass(frozen=True)
class Outcome:
    """A simulated job. `history` is what was committed, by step."""

    policy: str
    step_s: Sequence[float]
    gpu_s: Sequence[float]
    """Of each step, paid for."""
    total_gpu_s: float
    """Of the steps."""
    setup_s: float
    """Before the first step, until every process of every function has been started and parked,"""
    setup_gpu_s: float
    """and what that was paid for."""
    metrics: Sequence[Mapping[str, float]]
    """What the planner said of each step: predicted against measured."""
    plans: Sequence[StepResult]
    history: Sequence[Json]
    usage: Sequence[Usage]


def simulate(scenario: Scenario, policy: Policy, *, goal: Goal | None = None, deterministic: bool = False) -> Outcome:
    """Runs the scenario's steps to the end."""
    with tempfile.TemporaryDirectory() as directory:
        return run(_simulate(scenario, policy, goal or Goal(), deterministic, Path(directory)))


async def _simulate(scenario: Scenario, policy: Policy, goal: Goal, deterministic: bool, directory: Path) -> Outcome:
    exchange = MemoryExchange(asyncio.get_running_loop().time)
    pool = Pool(scenario.gpus, policy.colocated)
    platform = SimulatedPlatform(scenario.models(policy), exchange, pool=pool)
    job = _job(scenario, deterministic, directory)
    store = AsyncExchange(exchange, threads=False)
    recipe = find_recipe(scenario.recipe)
    planner = AdaptivePlanner(
        policy, goal=goal, priors=scenario.priors(policy), pool_gpus=scenario.gpus,
        gangs=[spec.name for spec in scenario.specs(policy) if spec.kind == "train"], turns=scenario.turns(policy),
    )  # fmt: skip
    results: list[StepResult] = []
    paid = [0.0]

    def committed(result: StepResult) -> None:
        if result.record.step:
            results.append(result)
        paid.append(platform.gpu_s())

    async def reported(_step: int, _report: StepReport) -> None:
        """Nothing is kept of a simulated step's results."""

    apart, together = scenario.models(policy), scenario.models(TURNS[0])
    for name, model in together.items():  # whoever begins to take turns has to be there, and stays
        together[name] = replace(model, start_s=apart[name].start_s, back_s=apart[name].back_s)

    def planned(_step: int, plan: StepPlan) -> None:
        if planner.turns is not None:
            platform.take_turns(together if plan.turns else apart, plan.turns)

    price = (scenario.device.usd_per_hour or 1.0) / 3600.0
    job_loop = Loop(
        job=job,
        recipe=recipe,
        prompts=scenario.prompts(),
        store=store,
        journal=await Journal.open(store),
        fleet=Fleet(platform, Invoker(platform)),
        planner=planner,
        epoch=1,
        limits=scenario.limits(policy),
        settings=train_settings(job, recipe),
        state_every=1,
        cost=lambda: Cost(gpu_s=platform.gpu_s(), usd=price * platform.gpu_s()),
        on_plan=planned,
        on_report=reported,
        on_commit=committed,
    )
    try:
        await platform.deploy(scenario.specs(policy))
        await _park_all(platform, scenario.specs(policy), apart)
        setup_s, setup_gpu_s = asyncio.get_running_loop().time(), platform.gpu_s()
        await job_loop.run()
    finally:
        await platform.close()
    return Outcome(
        policy=policy.name,
        step_s=[r.stop_s - r.start_s for r in results],
        gpu_s=[b - a for a, b in itertools.pairwise(paid[1:])],
        total_gpu_s=platform.gpu_s() - setup_gpu_s,
        setup_s=setup_s,
        setup_gpu_s=setup_gpu_s,
        metrics=[{k: v for k, v in r.report.observed.items() if k.startswith("planner/")} for r in results],
        plans=results,
        history=[r.record.history for r in results],
        usage=platform.usage(),
    )


async def _park_all(platform: SimulatedPlatform, specs: Sequence[FunctionSpec], models: Mapping[str, Model]) -> None:
    """From zero to parked: all processes of one function after those of the other, as many as there can be GPUs for."""
    for spec in specs:
        if models[spec.name].back_s is not None:
            await platform.scale(spec.name, spec.max_replicas)
            while any(replica.state == "starting" for replica in platform.replicas()):
                await asyncio.sleep(0.1)
            await platform.scale(spec.name, 0)
            await asyncio.sleep(models[spec.name].leave_s)


def _job(scenario: Scenario, deterministic: bool, directory: Path) -> JobConfig:
    """A job file for the loop; the model is one tensor that stands for all."""
    turns, (_, concurrency) = isinstance(scenario.lengths, Turns), scenario.environments
    header = encode_header([("state", "U8", (16,), 16)])
    (directory / "model.safetensors").write_bytes(header + bytes(16))
    (directory / "config.json").write_text(json.dumps({"model_type": "simulated"}))
    return parse_job(
        {
            "name": "simulated",
            "recipe": scenario.recipe,
            "steps": scenario.steps,
            "deterministic": deterministic,
            "model": {"path": str(directory)},
            "data": {"train": "simulated.jsonl", "prompts_per_step": scenario.prompts_per_step},
            "rollout": {
                "n": scenario.samples_per_prompt,
                "max_response_length": scenario.max_response_length,
                "slots": scenario.slots,
            },
            "seed": scenario.seed,
            "algorithm": scenario.algorithm,
            "validation": {"every": 0},
        }
        | ({"environment": {"kind": "simulated", "concurrency": concurrency}} if turns else {}),
        base=directory,
    )
