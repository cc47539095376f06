"""One whole optimizer step against TRL 1.16's GRPOTrainer: same weights, samples, scores; loss, norm, parameters.

    python bench/parity_step.py [--python PEER_PYTHON] [--freeze]
The peer runs in an environment of its own: --python names its interpreter, else one is built under --cache. --freeze
writes what tests/train/test_parity_step.py checks without a peer. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Json, Version
from functions.call.function import Context
from functions.exchange.directory import DirectoryExchange
from functions.models.pretrained import save_model
from functions.train.function import TrainFunction
from functions.weights.base import import_model
from functions.weights.store import fetch

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests" / "train" / "fixtures" / "trl_step.npz"
PEER = ("trl==1.16.0", "torch==2.13.0", "transformers==5.23.0")
VOCABULARY, N = 48, 4
_ADAM: Json = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}
CASES: dict[str, dict[str, Json]] = {
    "grpo, token mean, clipped gradient": {
        "trl": {"loss_type": "dapo", "learning_rate": 1e-3, "max_grad_norm": 0.2, "temperature": 0.9},
        "ours": {"temperature": 0.9, "aggregation": "token-mean", "optimizer": _ADAM | {"max_grad_norm": 0.2}},
    },
    "grpo, mean of sequence means, decay": {
        "trl": {"loss_type": "grpo", "learning_rate": 1e-3, "max_grad_norm": 100.0, "weight_decay": 0.1},
        "ours": {
            "aggregation": "seq-mean-token-mean", "optimizer": _ADAM | {"max_grad_norm": 100.0, "weight_decay": 0.1},
        },
    },
    "dr grpo": {
        "trl": {"loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 1e-3, "max_grad_norm": 1.0},
        "ours": {
            "advantage": "dr_grpo", "aggregation": "seq-mean-token-sum-norm",
            "optimizer": _ADAM | {"max_grad_norm": 1.0},
        },
    },
}  # fmt: skip

Arrays = dict[str, npt.NDArray[Any]]


def make_inputs(directory: Path) -> Arrays:
    """A tiny random model in `directory`, and samples for it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    save_model(model, directory)
    rng = np.random.default_rng(0)
    prompt_lengths, lengths = rng.integers(2, 7, 3), rng.integers(1, 14, 3 * N)
    responses = rng.integers(3, VOCABULARY, int(lengths.sum()))
    responses[np.cumsum(lengths)[lengths < lengths.max()] - 1] = 2  # they end with the end token, but for the longest
    return {
        "prompts": rng.integers(3, VOCABULARY, int(prompt_lengths.sum())), "prompt_lengths": prompt_lengths,
        "responses": responses, "response_lengths": lengths, "scores": rng.random(3 * N).astype(np.float32),
        "n": np.array(N), "cases": np.array(json.dumps(CASES)),
    }  # fmt: skip


def our_step(directory: Path, data: Arrays, params: Json, scratch: Path) -> Arrays:
    """loss, grad_norm and weights/<name> of one call of the train function."""
    exchange = DirectoryExchange(scratch / "exchange")
    base = import_model(exchange, "policy", directory)
    groups = len(data["prompt_lengths"])
    prompts = Ragged(data["prompts"].astype(np.int32), data["prompt_lengths"].astype(np.int32))
    row = np.repeat(np.arange(groups, dtype=np.int32), N)
    total = len(data["responses"])
    samples = SampleBatch(
        prompts, row, row, np.tile(np.arange(N, dtype=np.int32), groups),
        Ragged(data["responses"].astype(np.int32), data["response_lengths"].astype(np.int32)),
        np.full(total, -4, np.float32), np.ones(total, np.float32), np.full(groups * N, Finish.STOP, np.int32),
        np.zeros(groups * N, np.int32),
    )  # fmt: skip
    columns = Columns.of(samples, sample={"score": data["scores"].astype(np.float32)})
    inputs = {"samples": [exchange.put("s", samples.encode())], "columns": [exchange.put("c", columns.encode())]}
    if params.get("advantage", "grpo") == "grpo":
        params = params | {"advantage_options": {"epsilon": 1e-4}}  # TRL's
    params = params | {"max_response_length": int(data["response_lengths"].max())}
    params = params | {"max_rollout_logprob_diff": "off"}  # nobody sampled these
    call = Call("parity", "train", inputs, {"policy": base}, params)
    (event,) = TrainFunction(device="cpu").call(call, Context(exchange, str(scratch / "scratch")))
    metrics = event.data["metrics"]
    weights = fetch(exchange, Version.from_json(event.data["version"]))
    return {
        "loss": np.array(metrics["actor/pg_loss"]),
        "grad_norm": np.array(metrics["actor/grad_norm"]),
    } | {f"weights/{name}": tensor.numpy() for name, tensor in weights.items()}


def differences(ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """Largest absolute difference of loss, grad_norm (relative), and of all parameters."""
    names = [key for key in theirs if key.startswith("weights/")]
    if set(names) != {key for key in ours if key.startswith("weights/")}:
        raise ValueError(f"parameters differ: {sorted(set(names) ^ set(ours))}")
    return {
        "loss": abs(float(ours["loss"] - theirs["loss"])),
        "grad_norm": abs(float(ours["grad_norm"] / theirs["grad_norm"]) - 1.0),
        "parameters": max(float(np.abs(ours[key] - theirs[key]).max()) for key in names),
    }


def peer_python(cache: Path) -> Path:
    home = cache / "parity-step-trl-1.16.0"
    if not (home / "complete").exists():
        print(f"building {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "--quiet", *PEER], check=True)
        (home / "complete").touch()
    return home / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, help="interpreter of an environment with TRL 1.16")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "rlhf-orchestrate" / "peers")
    parser.add_argument("--freeze", action="store_true", help=f"write {FIXTURE.relative_to(ROOT)}")
    options = parser.parse_args()
    python = options.python or peer_python(options.cache)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        data = make_inputs(scratch / "model")
        np.savez(scratch / "in.npz", **data)  # type: ignore[arg-type]
        command = [python, ROOT / "bench" / "parity_step_peer.py", scratch / "model", scratch / "in.npz"]
        subprocess.run([*command, scratch / "out.npz"], check=True, cwd=folder, stdout=sys.stderr)
        theirs = dict(np.load(scratch / "out.npz"))
        rows = {}
        for number, (name, case) in enumerate(CASES.items()):
            ours = our_step(scratch / "model", data, case["ours"], scratch / str(number))
            peer = {key.partition("|")[2]: value for key, value in theirs.items() if key.startswith(f"{name}|")}
            rows[name] = differences(ours, peer)
        if options.freeze:
            from safetensors.numpy import load_file

            model = {f"model/{k}": v for k, v in load_file(scratch / "model" / "model.safetensors").items()}
            config = {"config": np.array((scratch / "model" / "config.json").read_text())}
            FIXTURE.parent.mkdir(parents=True, exist_ok=True)
            frozen: Any = {f"in/{k}": v for k, v in data.items()} | model | config
            frozen |= {f"out/{k}": v for k, v in theirs.items()}
            np.savez_compressed(FIXTURE, **frozen)
    print(f"{'case':<40}{'loss':>12}{'grad_norm':>12}{'parameters':>12}")
    for name, row in rows.items():
        print(f"{name:<40}{row['loss']:>12.2e}{row['grad_norm']:>12.2e}{row['parameters']:>12.2e}")
    worst = max(value for row in rows.values() for value in row.values())
    print(json.dumps({"cases": rows, "worst": worst, "bound": 1e-5}))
    return 0 if worst <= 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
