"""Peak memory of log-probabilities and entropy, forward and backward: chunked against naive, at a vocabulary of 150k.

    python bench/logprobs_memory.py [--tokens 2048] [--vocabulary 150000] [--hidden 896] [--chunk 256] [--device cpu]

Each form runs in a process of its own; the peak counts what the form adds to its inputs (on the CPU the growth of the
resident set's high-water mark (Linux), on CUDA the allocator's peak), gradients included: that of the weight is the
same in both and is not the logits' doing. Also prints means and norms to compare, and process CPU times. The last line
is one JSON object; exits 1 above 0.35 of the naive form.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from functions.algorithms.logprobs import Output, token_logprobs  # noqa: E402

LIMIT = 0.35


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a training loop writes first: all logits, log_softmax, gather."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def measure(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Peak bytes beyond the inputs, CPU seconds, and checksums of one forward and backward."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    hidden = torch.randn(options.tokens, options.hidden, device=device).requires_grad_()
    weight = torch.randn(options.vocabulary, options.hidden, device=device).mul_(0.1).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), device=device)
    before = reset_peak(device)
    start = time.process_time()
    if form == "naive":
        logprobs, entropy = naive(hidden, weight, targets)
    else:
        output = Output(weight=weight)
        logprobs, entropy = token_logprobs(hidden=hidden, output=output, targets=targets, chunk_tokens=options.chunk)
    torch.autograd.backward(logprobs.mean() + 0.1 * entropy.mean())
    seconds = time.process_time() - start
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "peak_bytes": peak_bytes(device) - before,
        "cpu_s": seconds,
        "logprobs": logprobs.mean().item(),
        "entropy": entropy.mean().item(),
        "grad_hidden": hidden.grad.norm().item(),
        "grad_weight": weight.grad.norm().item(),
    }


def reset_peak(device: torch.device) -> float:
    """Set the high-water mark of this process to what it holds now; returns that."""
    torch.zeros(8, 8, device=device) @ torch.zeros(8, 8, device=device)  # the libraries' own buffers
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> float:
    """High-water mark of this process on the device."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    status = Path("/proc/self/status").read_text()
    return 1024.0 * float(status.split("VmHWM:")[1].split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--form", choices=("naive", "chunked"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        print(json.dumps(measure(options.form, options)))
        return 0
    results = {}
    for form in ("naive", "chunked"):
        command = [sys.executable, __file__, *sys.argv[1:], "--form", form]
        results[form] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{'form':<10}{'peak MiB':>10}{'CPU s':>8}   logprobs / entropy / |grad hidden| / |grad weight|")
    for form, result in results.items():
        values = " / ".join(f"{result[name]:.7f}" for name in ("logprobs", "entropy", "grad_hidden", "grad_weight"))
        print(f"{form:<10}{result['peak_bytes'] / 2**20:>10.0f}{result['cpu_s']:>8.1f}   {values}")
    ratio = results["chunked"]["peak_bytes"] / results["naive"]["peak_bytes"]
    seconds = results["chunked"]["cpu_s"] / results["naive"]["cpu_s"]
    shape = {name: getattr(options, name) for name in ("tokens", "vocabulary", "hidden", "chunk", "device")}
    print(json.dumps({"peak_ratio": round(ratio, 4), "limit": LIMIT, "cpu_time_ratio": round(seconds, 2), **shape}))
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
