"""Every loss, advantage, KL, aggregation and correction against verl 0.9.1 and TRL 1.16.0 on random ragged batches.

    python bench/parity.py [--cache DIR] [--batches 40] [--freeze]

Builds a virtual environment with the peers under --cache (once), runs their own functions there
(bench/parity_peers.py), and compares. Prints the largest difference per case; the last line is one JSON object.
Exits 1 if a case differs by more than 1e-6 in fp32 (absolute; relative to values above 1, where one unit in the last
place of an fp32 number is more than that). `--freeze` also writes the first batches with the peers'
outputs to tests/algorithms/fixtures/, where tests/algorithms/test_parity.py checks them with no peer installed.

The batches: ragged lengths, groups of 2 to 5, half of them with masked tokens within the response (tool output), half
with a sequence masked throughout, and every fifth with log-ratios beyond +-20 (not for TRL, which has no bound).
What the peers add up over a response (GAE, returns, token baselines) they are given in float64: this project adds in
float64, and their rounding in fp32 is above 1e-6.
Scores within a group differ by 0.2 or more: the peers divide by the standard deviation in fp32, which amplifies their
rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from bench import parity_floor  # noqa: E402
from functions.algorithms import advantages as adv  # noqa: E402
from functions.algorithms.aggregation import Totals, aggregate, batch_totals  # noqa: E402
from functions.algorithms.correction import effective_sample_size, rollout_correction  # noqa: E402
from functions.algorithms.entropy import entropy_loss  # noqa: E402
from functions.algorithms.estimate import whiten  # noqa: E402
from functions.algorithms.kl import adaptive_kl_coef, kl_estimate, kl_loss  # noqa: E402
from functions.algorithms.logprobs import Output, token_logprobs  # noqa: E402
from functions.algorithms.metrics import combine_metrics  # noqa: E402
from functions.algorithms.names import AGGREGATIONS, KL_KINDS  # noqa: E402
from functions.algorithms.options import STATISTICS  # noqa: E402
from functions.algorithms.policy_losses import POLICY_LOSSES  # noqa: E402
from functions.algorithms.ragged import from_lengths, per_token  # noqa: E402
from functions.algorithms.rewards import token_rewards  # noqa: E402
from functions.algorithms.value_loss import value_loss  # noqa: E402

FIXTURE = ROOT / "tests" / "algorithms" / "fixtures" / "peers.npz"
TOLERANCE = 1e-6
NORM = 16
FROZEN = (2, 3, 4)  # a masked sequence, masked tokens, overflow
PEERS = (
    ("torch==2.13.0", "numpy"),
    ("--no-deps", "verl==0.9.1"),
    ("torch==2.13.0", "ray", "tensordict==0.10.0", "hydra-core", "codetiming", "trl==1.16.0"),
)
CLIP = {"vanilla": (0.2, 0.28), "gspo": (3e-2, 4e-2), "cispo": (1.0, 0.5)}

Arrays = dict[str, npt.NDArray[Any]]


def make_batch(number: int) -> Arrays:
    """Random inputs of one batch: flat [N] arrays, per-sequence [S] arrays, `lengths` and `group`."""
    rng = np.random.default_rng(number)
    sizes = rng.integers(2, 6, size=3)
    sequences = int(sizes.sum())
    lengths = rng.integers(1, NORM + 1, size=sequences)
    count = int(lengths.sum())
    mask = np.ones(count)
    if number % 2:
        mask = (rng.random(count) < 0.75).astype(float)
        mask[np.cumsum(lengths) - 1] = 1.0  # the peers put the score on the last token
    segment = np.repeat(np.arange(sequences), lengths)
    if number % 4 in (1, 2):
        mask[segment == rng.integers(sequences)] = 0.0
    old = -np.abs(rng.normal(size=count))
    overflow = number % 5 == 4
    flat = {
        "mask": mask,
        "old_logprobs": old,
        "logprobs": old + rng.normal(size=count) * (15.0 if overflow else 0.2),
        "reference_logprobs": old + rng.normal(size=count) * 0.3,
        "rollout_logprobs": old + rng.normal(size=count) * 0.1,
        "advantages": rng.normal(size=count) * 0.1,
        "weights": rng.random(count) * 2.0,
        "values": rng.normal(size=count) * 0.1,
        "old_values": rng.normal(size=count) * 0.1,
        "returns": rng.normal(size=count) * 0.1,
        "entropy": rng.random(count),
        "token_rewards": rng.normal(size=count) * 0.02,
        "logits": rng.normal(size=(count, 7)),
        "scores": 0.25 * rng.permutation(sequences) + rng.normal(size=sequences) * 0.02,
        "baselines": rng.random(sequences),
        "sequence_advantages": rng.normal(size=sequences) * 0.2,
    }
    if overflow:
        flat["rollout_logprobs"] = flat["logprobs"] + rng.normal(size=count) * 0.1
        flat["reference_logprobs"] = flat["logprobs"] + rng.normal(size=count) * 15.0
        # GSPO has no dual clip: its loss is bounded only where a large sequence ratio meets a positive advantage
        drift = np.bincount(segment, (flat["logprobs"] - old) * mask)[segment]
        flat["advantages"] = np.where(drift > 0, np.abs(flat["advantages"]), flat["advantages"])
    arrays: Arrays = {name: value.astype(np.float32) for name, value in flat.items()}
    arrays["lengths"] = lengths.astype(np.int32)
    arrays["group"] = np.repeat(np.arange(3), sizes).astype(np.int32)
    arrays["overflow"] = np.array([overflow])
    arrays["targets"] = rng.integers(0, 7, size=count)
    chance = np.exp(old)
    arrays["squared_mass"] = (chance**2 + rng.random(count) * (1.0 - chance) ** 2).astype(np.float32)
    arrays["teacher_logits"] = rng.normal(size=(count, 7)).astype(np.float32)
    arrays["second_score"] = (0.25 * rng.permutation(sequences) + 1.0).astype(np.float32)
    return arrays


class Flat:
    """One batch in this project's form."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.sequences = len(arrays["lengths"])
        self.segment = from_lengths(lengths=self.arrays["lengths"].long())
        self.group = self.arrays["group"].long()
        self.mask = self.arrays["mask"]
        self.totals = batch_totals(mask=self.mask, segment=self.segment, num_sequences=self.sequences, norm=float(NORM))

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def leaf(self, name: str) -> Tensor:
        return self.arrays[name].clone().requires_grad_()

    def where(self, aggregation: str = "", totals: Totals | None = None) -> dict[str, Any]:
        where: dict[str, Any] = {"segment": self.segment, "mask": self.mask, "totals": totals or self.totals}
        return where | ({"aggregation": aggregation} if aggregation else {})


def ours(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """What this project computes for one batch, under the names of bench/parity_peers.py."""
    batch = Flat(arrays)
    older = _losses(batch) | _kl(batch) | _advantages(batch) | _correction(batch) | _trl(batch)
    return older | parity_floor.ours(batch)


def _losses(batch: Flat) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    inputs: dict[str, Any] = {name: batch[name] for name in ("old_logprobs", "advantages")}
    for name, (low, high) in CLIP.items():
        for mode in AGGREGATIONS if name != "gspo" else ("seq-mean-token-mean",):
            for weighted in (False, True):
                leaf = batch.leaf("logprobs")
                weights = batch["weights"] if weighted else None
                clip = {"clip_low": low, "clip_high": high, "weights": weights}
                loss, metrics = POLICY_LOSSES[name](logprobs=leaf, **inputs, **clip, **batch.where(mode))
                key = f"verl/{name}/{mode}/{'weighted' if weighted else 'plain'}"
                out[f"{key}/loss"] = loss
                (out[f"{key}/gradient"],) = torch.autograd.grad(loss, leaf)
        for metric in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"):
            out[f"verl/{name}/{metric}"] = metrics[metric]
    for mode in AGGREGATIONS:
        out[f"verl/agg_loss/{mode}"] = aggregate(losses=batch["advantages"], **batch.where(mode))
        leaf = batch.leaf("values")
        inputs = {name: batch[name] for name in ("old_values", "returns")}
        loss, metrics = value_loss(values=leaf, clip=0.1, **inputs, **batch.where(mode))
        out[f"verl/value_loss/{mode}/loss"] = loss
        (out[f"verl/value_loss/{mode}/gradient"],) = torch.autograd.grad(loss, leaf)
        out[f"verl/value_loss/{mode}/clipfrac"] = metrics["critic/vf_clipfrac"]
    return out


def _kl(batch: Flat) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for kind in KL_KINDS:
        leaf = batch.leaf("logprobs")
        estimate = kl_estimate(logprobs=leaf, reference_logprobs=batch["reference_logprobs"], kind=kind) * batch.mask
        out[f"verl/kl/{kind}"] = estimate
        (out[f"verl/kl/{kind}/gradient"],) = torch.autograd.grad(estimate.sum(), leaf)
    coef = 0.05
    for kl, sequences in ((0.3, 16), (0.11, 32), (0.02, 64)):
        coef = adaptive_kl_coef(coef=coef, kl=kl, target=0.1, horizon=200, sequences=sequences)
        out[f"verl/adaptive_kl/{kl}"] = torch.tensor(coef)
    return out


def _advantages(batch: Flat) -> dict[str, Tensor]:
    place: dict[str, Any] = {"segment": batch.segment, "mask": batch.mask}
    scored = {"scores": batch["scores"], "group": batch.group, **place}
    rewards = token_rewards(scores=batch["scores"], kl=-batch["token_rewards"], kl_coef=1.0, **place)
    estimates = {
        "gae": adv.gae(rewards=rewards, values=batch["values"], gamma=0.99, lam=0.95, **place),
        "grpo": adv.grpo(**scored),
        "grpo/epsilon": adv.grpo(epsilon=1e-4, **scored),
        "dr_grpo": adv.dr_grpo(**scored),
        "rloo": adv.rloo(**scored),
        "remax": adv.remax(rewards=rewards, baselines=batch["baselines"], **place),
        "reinforce_plus_plus": adv.reinforce_plus_plus(rewards=rewards, gamma=0.97, **place),
        "reinforce_plus_plus_baseline": adv.reinforce_plus_plus_baseline(**scored),
    }
    out: dict[str, Tensor] = {}
    for name, estimate in estimates.items():
        out[f"verl/advantage/{name}"] = estimate.advantages
        out[f"verl/advantage/{name}/returns"] = estimate.returns
    for shift in (True, False):
        out[f"verl/whiten/{shift}"] = whiten(values=batch["advantages"], mask=batch.mask, shift_mean=shift)
    return out


def _correction(batch: Flat) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    inputs = {name: batch[name] for name in ("logprobs", "rollout_logprobs")} | batch.where()
    for level in ("token", "sequence"):
        for floor, cap, spec in ((None, 1.2, "1.2"), (0.8, 1.3, "0.8_1.3")):
            weights, _, metrics = rollout_correction(level=level, cap=cap, floor=floor, **inputs)
            combined = combine_metrics([metrics])
            key = f"verl/correction/{level}/{spec}"
            out[f"{key}/weights"] = weights
            out[f"{key}/rollout_is_mean"] = metrics["rollout_corr/rollout_is_mean"]
            out[f"{key}/rollout_is_eff_sample_size"] = torch.tensor(effective_sample_size(combined))
    for statistic in STATISTICS:
        bound = (0.9, 1.15) if statistic.endswith("k1") else 0.02
        _, mask, metrics = rollout_correction(reject={statistic: bound}, **inputs)
        out[f"verl/correction/reject/{statistic}/mask"] = mask
        fraction = metrics["rollout_corr/rollout_rs_masked_fraction"]
        out[f"verl/correction/reject/{statistic}/masked_fraction"] = fraction
    for name, value in metrics.items():
        out[f"verl/correction/{name.removeprefix('rollout_corr/')}"] = value
    out["verl/logprobs"], out["verl/entropy"] = token_logprobs(
        hidden=batch["logits"], output=Output(weight=torch.eye(7)), targets=batch["targets"], chunk_tokens=5
    )
    return out


def _trl(batch: Flat) -> dict[str, Tensor]:
    """TRL divides by all sequences; `Totals.sequences` says so."""
    every = Totals(tokens=batch.totals.tokens, sequences=batch.sequences, norm=float(NORM))
    cases = {
        "grpo": ("vanilla", "seq-mean-token-mean"),
        "grpo/kl": ("vanilla", "seq-mean-token-mean"),
        "grpo/sequence": ("gspo", "seq-mean-token-mean"),
        "bnpo": ("vanilla", "token-mean"),
        "bnpo/delta": ("vanilla", "token-mean"),
        "bnpo/rollout weights": ("vanilla", "token-mean"),
        "bnpo/entropy": ("vanilla", "token-mean"),
        "dapo": ("vanilla", "token-mean"),
        "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
        "luspo": ("vanilla", "seq-mean-token-sum"),
        "cispo": ("cispo", "token-mean"),
    }
    out: dict[str, Tensor] = {}
    flat_advantages = per_token(values=batch["sequence_advantages"], segment=batch.segment)
    for name, (function, mode) in cases.items():
        where = batch.where(mode, every)
        leaf, entropy = batch.leaf("logprobs"), batch.leaf("entropy")
        options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
        if function == "cispo":
            options = {"clip_low": 1.0, "clip_high": 0.5}
        if function == "vanilla":
            options["dual_clip"] = 3.0 if name == "bnpo/delta" else None
        if name == "bnpo/rollout weights":
            options["weights"] = batch["weights"]
        loss, _ = POLICY_LOSSES[function](
            logprobs=leaf, old_logprobs=batch["old_logprobs"], advantages=flat_advantages, **options, **where
        )
        if name == "grpo/kl":
            reference = batch["reference_logprobs"]
            loss = loss + kl_loss(logprobs=leaf, reference_logprobs=reference, kind="k3", coef=0.04, **where)[0]
        if name == "bnpo/entropy":
            loss = loss + entropy_loss(entropy=entropy, coef=0.01, **where)[0]
        torch.autograd.backward(loss)
        out[f"trl/{name}/loss"] = loss
        out[f"trl/{name}/gradient"] = gradient(leaf)
        if name == "bnpo/entropy":
            out[f"trl/{name}/entropy gradient"] = gradient(entropy)
    return out


def gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def differences(batches: Mapping[str, Arrays], peers: Mapping[str, npt.NDArray[Any]]) -> dict[str, float]:
    """case -> largest |ours - peer| / max(1, |peer|) over all batches. A case that only one side has is an error."""
    largest: dict[str, float] = {}
    for number, arrays in batches.items():
        mine = ours(arrays)
        theirs = {key.partition("|")[2]: value for key, value in peers.items() if key.partition("|")[0] == number}
        missing = set(theirs) - set(mine)
        if missing:
            raise KeyError(f"no counterpart of {sorted(missing)[0]} (and {len(missing) - 1} more)")
        for key, value in theirs.items():
            distance = np.abs(mine[key].detach().numpy().astype(np.float32) - value)
            difference = float((distance / np.maximum(1.0, np.abs(value))).max())
            largest[key] = max(largest.get(key, 0.0), difference)
    return largest


def peers_python(cache: Path) -> Path:
    """The interpreter of an environment with the peers, built on first use."""
    home = cache / "parity-verl-0.9.1-trl-1.16.0"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        print(f"building {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        for packages in PEERS:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (home / "complete").touch()
    return python


def run_peers(python: Path, batches: Mapping[str, Arrays]) -> Arrays:
    """What the peers return for the batches, by "<batch>|<case>"."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.npz", Path(folder) / "out.npz"
        inputs: Any = {f"{n}/{name}": array for n, arrays in batches.items() for name, array in arrays.items()}
        np.savez(source, **inputs)
        script = ROOT / "bench" / "parity_peers.py"
        subprocess.run([python, script, source, target], check=True, cwd=folder)
        return dict(np.load(target))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rlhf-orchestrate" / "peers")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--freeze", action="store_true", help="write tests/algorithms/fixtures/peers.npz")
    options = parser.parse_args()
    batches = {str(number): make_batch(number) for number in range(options.batches)}
    peers = run_peers(peers_python(options.cache), batches)
    if options.freeze:
        kept = [str(number) for number in FROZEN]
        frozen: Any = {f"in/{n}/{name}": array for n in kept for name, array in batches[n].items()}
        frozen |= {f"out/{key}": value for key, value in peers.items() if key.partition("|")[0] in kept}
        FIXTURE.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(FIXTURE, **frozen)
    largest = differences(batches, peers)
    width = max(map(len, largest))
    for case, difference in largest.items():
        print(f"{case:<{width}}  {difference:.1e}{'' if difference <= TOLERANCE else '  ABOVE 1e-6'}")
    above = [case for case, difference in largest.items() if difference > TOLERANCE]
    summary = {"cases": len(largest), "batches": options.batches, "largest": max(largest.values()), "above": above}
    print(json.dumps(summary))
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
