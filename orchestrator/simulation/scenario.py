"""A cluster and a job to simulate: which GPUs, which model, which lengths; and what its functions' work then takes.

What is assumed rather than measured stands here, one field each, so that a reader can change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.planner.base import FunctionLimits
from orchestrator.planner.devices import Device, ModelShape, kv_capacity_tokens
from orchestrator.planner.latency import WorkCost, forward_prior, generate_prior, train_prior
from orchestrator.planner.learned import Priors
from orchestrator.platforms.base import FunctionSpec
from orchestrator.simulation.functions import Generate, Model, Work
from orchestrator.simulation.lengths import Lengths


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
    forward_gpus: int = 1
    """GPUs of one replica of reference and critic."""
    train_gpus: int | None = None
    """GPUs of the train function where functions have their own; None: all (with a critic: half each)."""
    slots: int = 256
    process_s: float = 2.0
    """Start of a function without its weights, on a node that has the image and a parked process (engine and graphs up,
    as after vLLM's level-1 sleep: 0.26 to 3 s on record). 25 s is on record for a process from nothing."""
    link_gb_s: float = 6.25
    """Exchange to GPU, per GPU: g6e.48xlarge has 400 Gbit/s for 8."""
    reshard_s: float = 1.0
    """Colocated: training layout to generation layout, and the engine's sleep and wake-up."""
    call_s: float = 0.1
    """Any call: accept, read inputs, write results."""
    reward_sample_s: float = 0.002
    """One sample's score, on a CPU replica."""
    reward_replicas: int = 8
    recompute: bool = True
    """Gradient checkpointing."""

    @property
    def critics(self) -> bool:
        return self.recipe == "ppo"

    def specs(self, colocated: bool) -> list[FunctionSpec]:
        """In the order in which a step first uses them; prices by GPU, as the device table has them."""
        price = self.device.usd_per_hour or 1.0
        forward = self.gpus // self.forward_gpus
        names = [("generate", "generate", self.gpus // self.generate_gpus, self.generate_gpus)]
        names += [("reward", "reward", self.reward_replicas, 0), ("reference", "reference", forward, self.forward_gpus)]
        if self.critics:
            names.append(("critic", "reference", forward, self.forward_gpus))
            names.append(("train-critic", "train", 1, self._train_gpus(colocated)))
        names.append(("train", "train", 1, self._train_gpus(colocated)))
        return [
            FunctionSpec(name, kind, max_replicas=most, gpus=gpus, usd_per_hour=price * gpus)
            for name, kind, most, gpus in names
        ]

    def models(self, colocated: bool) -> dict[str, Model]:
        """Each function's work. In a colocated pool nothing starts, and weights are resharded instead of loaded."""
        found: dict[str, Model] = {}
        for spec in self.specs(colocated):
            loads = self.model.weight_bytes / 1e9 / (self.link_gb_s * max(1, spec.gpus))
            start_s = 0.0 if colocated else self.process_s
            if spec.kind == "generate":
                cost = generate_prior(self.device, self.model, spec.gpus, call_s=self.call_s)
                found[spec.name] = Generate(
                    cost, self.lengths, start_s, self.reshard_s if colocated else loads, self.slots,
                    kv_capacity_tokens(self.device, self.model, spec.gpus),
                )  # fmt: skip
            elif spec.kind == "reward":
                cost_of_reward = WorkCost(self.call_s, self.reward_sample_s, 0.0)
                found[spec.name] = Work("reward", cost_of_reward, 0.0 if colocated else 1.0)
            elif spec.kind == "reference":
                forward = forward_prior(self.device, self.model, spec.gpus, call_s=self.call_s)
                found[spec.name] = Work("reference", forward, start_s, 0.0 if colocated else loads)
            else:
                train = train_prior(
                    self.device, self.model, spec.gpus, call_s=self.call_s, recompute=self.recompute
                )  # fmt: skip
                # A train function also loads its optimizer state: fp32 weights and two moments, 12 bytes a parameter.
                state_s = 12 * self.model.parameters / 1e9 / (self.link_gb_s * spec.gpus)
                publish_s = loads + state_s  # and writes both at the end
                held = start_s if colocated else start_s + state_s
                cost_of_train = WorkCost(train.call_s + (0.0 if colocated else publish_s), 0.0, train.token_s)
                found[spec.name] = Work("train", cost_of_train, held, 0.0 if colocated else loads)
        return found

    def limits(self, colocated: bool) -> dict[str, FunctionLimits]:
        kv = kv_capacity_tokens(self.device, self.model, self.generate_gpus)
        return {
            s.name: FunctionLimits(
                s.max_replicas, s.usd_per_hour, s.gpus, self.slots, kv if s.kind == "generate" else None
            )
            for s in self.specs(colocated)
        }

    def priors(self, colocated: bool) -> Priors:
        """What a planner is told beforehand: the roofline, and the cold starts as configured."""
        models = self.models(colocated)
        work: Mapping[str, WorkCost] = {name: m.cost for name, m in models.items() if isinstance(m, Work)}
        generate = models["generate"]
        assert isinstance(generate, Generate), "generate generates"
        return Priors(generate.cost, work, {name: m.start_s for name, m in models.items()})

    def _train_gpus(self, colocated: bool) -> int:
        if colocated:
            return self.gpus
        if self.train_gpus is not None:
            return self.train_gpus
        return self.gpus // 2 if self.critics else self.gpus
