"""A cluster and a job to simulate: which GPUs, which model, which lengths; and what its functions' work then takes.

What is assumed rather than measured stands here, one field each, so that a reader can change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from functions.base.wire import Json
from orchestrator.job.data import Row, Tokenized
from orchestrator.job.prompts import NOTHING, PromptSource
from orchestrator.job.roles import roles_of
from orchestrator.planner.base import TAIL, FunctionLimits
from orchestrator.planner.devices import Device, ModelShape, kv_capacity_tokens
from orchestrator.planner.latency import WorkCost, forward_prior, generate_prior, train_prior
from orchestrator.planner.learned import Priors
from orchestrator.planner.policies import TURNS, Policy
from orchestrator.platforms.base import FunctionSpec, Usage
from orchestrator.simulation.functions import Generate, Model, Work
from orchestrator.simulation.lengths import Lengths, Turns


@dataclass(frozen=True)
class Scenario:
    name: str
    device: Device
    model: ModelShape
    gpus: int
    recipe: str
    """`grpo` or `ppo`."""
    lengths: Lengths
    prompts_per_step: int
    samples_per_prompt: int
    max_response_length: int
    prompt_tokens: int = 200
    """Of each prompt, after the head."""
    head_tokens: int = 50
    """System prompt that all prompts share."""
    epoch_steps: int = 5
    """Steps until prompts come again."""
    steps: int = 20
    generate_gpus: int = 1
    """Tensor parallelism of one replica of generate."""
    tail_gpus: int | None = None
    """The same of one replica of the function that a tail may go on with; None: there is none."""
    forward_gpus: int = 1
    """GPUs of one replica of reference and critic."""
    rank_gpus: int = 1
    """GPUs of one rank of a train function."""
    train_gpus: int | None = None
    """GPUs of the train function where functions have their own and a policy does not choose them; None: all (with a
    critic: half each)."""
    slots: int = 256
    seed: int = 0
    """Of the order in which prompts are drawn."""
    process_s: float = 2.0
    """zero -> working: start of a function without its weights. 25 s is on record for a process from nothing; 2 s was
    taken for a parked one before those had `back_s`."""
    back_s: float | None = None
    """parked -> working, without its weights. All processes are started once, before the first step
    (Outcome.setup_s), and parked on their nodes from then on; None: nothing parks, a function that goes is zero."""
    leave_s: float = 0.0
    """working -> parked: until its GPUs can be given to another pod."""
    node_gb_s: float | None = None
    """From the memory of a replica's own node, per GPU; None: there is no node tier, everything crosses the link."""
    node_gpus: int = 8
    """GPUs of a node: what a node reads for all of its replicas crosses that many links."""
    link_gb_s: float = 6.25
    """Exchange to GPU, per GPU: g6e.48xlarge has 400 Gbit/s for 8."""
    delta_fraction: float = 0.1
    """Of the time that weights take: a next version, where the one before is held. ASSUMED: 0.016 of the bytes and 0.07
    of the CPU seconds were measured (docs/weights.md)."""
    reshard_s: float = 1.0
    """Colocated: training layout to generation layout, and the engine's sleep and wake-up."""
    call_s: float = 0.1
    """Any call: accept, read inputs, write results."""
    reward_sample_s: float = 0.002
    """One sample's score, on a CPU replica."""
    reward_replicas: int = 8
    recompute: bool = True
    """Gradient checkpointing."""
    environments: tuple[int, int] = (256, 16)
    """Replicas of the environment, and episodes that each serves at a time, where `lengths` are Turns."""

    @property
    def unit(self) -> str:
        """What is held and paid for by the second."""
        return "GPU"

    def usd(self, usage: Sequence[Usage], now_s: float) -> float | None:
        """What the usage costs; None where the price of a GPU, by which it is worked out else, is all that is known."""
        return None

    @property
    def critics(self) -> bool:
        return self.recipe == "ppo"

    @property
    def state_bytes(self) -> float:
        """What a train function reads before a step and writes after it: weights in bf16, masters in fp32 and
        two moments."""
        return self.model.weight_bytes + 12.0 * self.model.parameters

    @property
    def least_ranks(self) -> int:
        """Fewest ranks that hold weights, gradients and moments (16 bytes a parameter) in 70 % of their memory."""
        room = 0.7 * self.rank_gpus * self.device.memory_gib * 2**30
        return -(-16 * int(self.model.parameters) // int(room))

    @property
    def algorithm(self) -> Json:
        """As in a job file."""
        return {"kl": {"coef": 0.001}}

    def prompts(self) -> PromptSource:
        """Prompts of random tokens behind a common head."""
        rng = np.random.default_rng(0)
        count = self.epoch_steps * self.prompts_per_step
        head = list(range(self.head_tokens))
        own = rng.integers(1000, 30_000, (count, self.prompt_tokens)).tolist()
        rows = [Row(i, f"simulated.jsonl:{i + 1}", "simulated", b"{}") for i in range(count)]
        return PromptSource(Tokenized(rows, [head + tokens for tokens in own], []), NOTHING, shuffle=True)

    def adapted(self, policy: Policy) -> Policy:
        """The policy as this cluster can have it."""
        return policy

    def specs(self, policy: Policy) -> list[FunctionSpec]:
        """In the order in which a step first uses them; prices by GPU, as the device table has them."""
        price = self.device.usd_per_hour or 1.0
        forward = self.gpus // self.forward_gpus
        by_kind = {
            "generate": (self.gpus // self.generate_gpus, self.generate_gpus),
            "environment": (self.environments[0], 0),
            "reward": (self.reward_replicas, 0),
            "reference": (forward, self.forward_gpus),
            "train": (self._ranks(policy), self.rank_gpus),
        }
        by_name = {} if self.tail_gpus is None else {TAIL: (self.gpus // self.tail_gpus, self.tail_gpus)}
        models = ("reference", *("critic",) * self.critics, *("environment",) * isinstance(self.lengths, Turns))
        return [
            FunctionSpec(role.name, role.kind, max_replicas=most, gpus=gpus, usd_per_hour=price * gpus)
            for role in roles_of(models, tail=policy.tail_function and TAIL in by_name)
            for most, gpus in [by_name.get(role.name, by_kind[role.kind])]
        ]

    def models(self, policy: Policy) -> dict[str, Model]:
        """Each function's work. In a colocated pool nothing starts, and weights are resharded instead of loaded."""
        found: dict[str, Model] = {}
        colocated = policy.colocated
        for spec in self.specs(policy):
            own = max(1, spec.gpus)
            loads = self.reshard_s if colocated else self._read_s(self.model.weight_bytes, own)
            delta_s = loads if colocated else self.delta_fraction * loads
            start_s, back_s = (0.0, None) if colocated else (self.process_s, self.back_s)
            if back_s is not None and spec.kind in ("generate", "reference"):  # the version that it held, from the host
                back_s += self.model.weight_bytes / 1e9 / (self._node_gb_s * own)
            leave_s = 0.0 if back_s is None else self.leave_s
            if spec.kind == "generate":
                cost = generate_prior(self.device, self.model, spec.gpus, link_gb_s=self.link_gb_s, call_s=self.call_s)
                found[spec.name] = Generate(
                    cost, self.lengths, start_s, loads, delta_s, self.slots,
                    kv_capacity_tokens(self.device, self.model, spec.gpus), back_s=back_s, leave_s=leave_s,
                )  # fmt: skip
            elif spec.kind == "environment":
                assert isinstance(self.lengths, Turns), "has an environment"
                start_s = 0.0 if colocated else 1.0
                found[spec.name] = Work("environment", WorkCost(0.01, 0.0, 0.0), start_s, turns=self.lengths)
            elif spec.kind == "reward":
                cost_of_reward = WorkCost(self.call_s, self.reward_sample_s, 0.0)
                found[spec.name] = Work("reward", cost_of_reward, 0.0 if colocated else 1.0)
            elif spec.kind == "reference":
                forward = forward_prior(self.device, self.model, spec.gpus, call_s=self.call_s)
                held = (0.0, 0.0) if colocated else (loads, delta_s)
                found[spec.name] = Work("reference", forward, start_s, *held, back_s=back_s, leave_s=leave_s)
            else:
                train = train_prior(self.device, self.model, spec.gpus, call_s=self.call_s, recompute=self.recompute)
                if policy.old_logprobs and not self.critics:  # with a critic the reference function has them
                    again = forward_prior(self.device, self.model, spec.gpus)
                    train = WorkCost(train.call_s, train.sample_s, train.token_s + again.token_s)
                state_s = 0.0 if colocated else self.state_bytes / 1e9 / (self._node_gb_s * own)
                found[spec.name] = Work("train", train, start_s, state_s=state_s, back_s=back_s, leave_s=leave_s)
        return found

    def limits(self, policy: Policy) -> dict[str, FunctionLimits]:
        return {
            s.name: FunctionLimits(
                s.max_replicas, s.usd_per_hour, s.gpus, self.slots,
                min(s.max_replicas, self.least_ranks) if s.kind == "train" else None,
                kv_capacity_tokens(self.device, self.model, s.gpus) if s.kind == "generate" else None,
            )
            for s in self.specs(policy)
        }  # fmt: skip

    def priors(self, policy: Policy) -> Priors:
        """What a planner is told beforehand: the roofline, and the cold starts as configured, loading included."""
        models = self.models(policy)
        work: dict[str, WorkCost] = {}
        for spec in self.specs(policy):
            model = models[spec.name]
            if isinstance(model, Work):
                work[spec.name] = replace(model.cost, shared_s=2 * model.state_s)
        generate = models["generate"]
        assert isinstance(generate, Generate), "generate generates"
        tail = models.get(TAIL)
        wide = tail.cost if isinstance(tail, Generate) else None
        start_s = {name: m.start_s + m.load_s for name, m in models.items()}
        start_s |= {name: m.back_s + m.delta_s for name, m in models.items() if m.back_s is not None}
        return Priors(generate.cost, work, start_s, wide)

    def turns(self, policy: Policy) -> Priors | None:
        """The same where functions take turns on all GPUs, for a policy that may choose to: nothing starts, nothing is
        loaded but for the reshard before generation."""
        if policy.replicas != "goal":
            return None
        found = self.priors(TURNS[0])
        assert found.generate is not None, "the roofline"
        generate = replace(found.generate, call_s=found.generate.call_s + self.reshard_s)
        return replace(found, generate=generate, start_s=dict.fromkeys(found.start_s, 0.0))

    @property
    def _node_gb_s(self) -> float:
        return self.link_gb_s if self.node_gb_s is None else self.node_gb_s

    def _read_s(self, count: float, gpus: int) -> float:
        """So many bytes that were written elsewhere, to a replica of so many GPUs: over its own links; with a node tier
        once for all replicas of the node, over all of its links, and from there."""
        if self.node_gb_s is None:
            return count / 1e9 / (self.link_gb_s * gpus)
        return count / 1e9 * (1 / (self.link_gb_s * min(self.node_gpus, self.gpus)) + 1 / (self.node_gb_s * gpus))

    def _ranks(self, policy: Policy) -> int:
        """All GPUs where functions take turns on them or ranks are chosen each step; else as configured."""
        gpus = self.gpus
        if not policy.colocated and not policy.stream:
            gpus = self.train_gpus or (gpus // 2 if self.critics else gpus)
        return gpus // self.rank_gpus
