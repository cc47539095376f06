"""The roofline prior against the published times per output token it was fitted to, and the tables' edges."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.devices import device, kv_capacity_tokens, shape
from orchestrator.planner.latency import forward_prior, generate_prior, start_prior_s, train_prior


@pytest.mark.parametrize(
    ("model", "gpu", "tensor_parallel", "published_ms"),
    [
        ("Qwen2.5-3B", "L40S", 1, (11.1, 14.5, 24.9)),
        ("Qwen2.5-7B", "L40S", 1, (25.1, 30.3, 46.0)),
        ("Qwen2.5-7B", "H100", 1, (7.2, 8.8, 13.5)),
        ("Llama-2-70B", "H100", 4, (16.8, 18.8, 25.2)),
    ],
)
def test_decode_prior_is_within_8_percent(
    model: str, gpu: str, tensor_parallel: int, published_ms: tuple[float, ...]
) -> None:
    cost = generate_prior(device(gpu), shape(model), tensor_parallel)
    ours = [1e3 * cost.decode_s(1, batch, batch * 600) for batch in (1, 64, 256)]
    np.testing.assert_allclose(ours, published_ms, rtol=0.08)


def test_shapes_give_the_known_key_value_bytes() -> None:
    assert shape("Qwen2.5-7B").kv_bytes_per_token == 57_344  # seeds: Qwen2.5-7B
    assert shape("Llama-2-70B").kv_bytes_per_token == 327_680


def test_prefill_and_train_are_flops_over_achieved_flops() -> None:
    gpu, model = device("H100"), shape("Qwen2.5-7B")
    token_s = 2 * 7.616e9 / (989.5e12 * 0.45)
    assert generate_prior(gpu, model).prefill_token_s == pytest.approx(token_s)
    assert forward_prior(gpu, model, 4).token_s == pytest.approx(token_s / 4)
    assert train_prior(gpu, model, 8).token_s == pytest.approx(4 * token_s / 8)
    assert train_prior(gpu, model, 8, recompute=False).token_s == pytest.approx(3 * token_s / 8)
    assert start_prior_s(2, model, process_s=5.0, load_gb_s=1.0) == pytest.approx(5 + 15.232 / 2)


def test_kv_capacity_by_hand() -> None:
    # 0.9 * 48 GiB is 46,385,646,796.8 bytes; less 15.232e9 of weights 31,153,646,796.8; each token 57,344.
    assert kv_capacity_tokens(device("L40S"), shape("Qwen2.5-7B"), 1) == 543_276
    with pytest.raises(ValueError, match=r"Llama-2-70B does not fit on 1 x H100 \(wants at least 2\)"):
        kv_capacity_tokens(device("H100"), shape("Llama-2-70B"), 1)


def test_unknown_names_list_the_table() -> None:
    with pytest.raises(ValueError, match=r"device 'B200' is not in the table .*A100, H100, H200, L40S"):
        device("B200")
    with pytest.raises(ValueError, match="model 'x' has no shape"):
        shape("x")


def test_every_device_says_where_its_numbers_come_from() -> None:
    for name in ("A100", "H100", "H200", "L40S"):
        assert "vendor" in device(name).source
    assert device("H200").usd_per_hour is None
    assert "ASSUMED" in device("A100").source
