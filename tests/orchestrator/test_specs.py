"""What the planner is told of the functions: the room for keys and values, and jobs that do not fit it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import load_job
from orchestrator.job.functions import check_room, function_limits
from orchestrator.session.job_planner import job_priors
from orchestrator.session.session import prepare
from tests.support.tiny_job import make_job

VLLM = ["deterministic=false", "rollout.engine=vllm"]
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values x two layers x two heads x 8 x fp32."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job")).file


def kv(file: Path, *words: str) -> int | None:
    prepared = prepare(load_job(file, words))
    limits = function_limits(prepared.job, prepared.specs)
    assert {name: limit.kv_tokens for name, limit in limits.items() if name != "generate"} == {
        name: None for name in limits if name != "generate"
    }
    return limits["generate"].kv_tokens


def test_the_room_is_vllms_cache_and_of_no_concern_to_the_torch_engine(file: Path) -> None:
    assert kv(file) is None
    assert kv(file, *VLLM) is None  # measured when it starts
    assert kv(file, *VLLM, "rollout.vllm.kv_cache_mb=3") == 3 * 2**20 // TOKEN_BYTES
    assert kv(file, "deterministic=false", "rollout.engine=torch", "rollout.vllm.kv_cache_mb=3") is None


def test_the_room_beside_the_weights_of_a_gpu_in_the_table(file: Path) -> None:
    gpu = ["model.dtype=bfloat16", "planner.gpu=L40S", "functions.generate.gpus=1"]
    room = kv(file, *VLLM, *gpu)
    assert room is not None
    assert room == pytest.approx(48 * 2**30 * 0.9 / (TOKEN_BYTES / 2), rel=1e-4)
    half = kv(file, *VLLM, *gpu, "rollout.vllm.memory_fraction=0.45")
    assert half == pytest.approx(room / 2, rel=1e-4)


def test_samples_that_have_no_room_are_refused_before_anything_starts(file: Path) -> None:
    small = [*VLLM, "rollout.vllm.kv_cache_mb=1", "rollout.max_response_length=5000"]
    with pytest.raises(ConfigError, match=r"^rollout.max_response_length: a sample may have 50\d\d tokens, .* 4096"):
        kv(file, *small)


def test_responses_beyond_the_models_context_are_refused(file: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"a sample may have 7\d tokens, the model's context is 64 \(wants at most 5\d\)"
    ):
        kv(file, "rollout.max_response_length=70")


WIDE = [
    *VLLM, "planner.policy=adaptive", "planner.gpu=L40S", "model.dtype=bfloat16", "functions.generate.gpus=1",
    "functions.generate-tail.gpus=4", "functions.generate-tail.replicas=3", "functions.generate-tail.usd_per_hour=8.0",
]  # fmt: skip


def test_the_tails_function_has_gpus_room_and_priors_of_its_own(file: Path) -> None:
    prepared = prepare(load_job(file, WIDE))
    specs = {spec.name: spec for spec in prepared.specs}
    assert list(specs) == ["generate", "generate-tail", "reward", "train"]
    one, wide = specs["generate"], specs["generate-tail"]
    assert (wide.kind, wide.gpus, wide.max_replicas, wide.usd_per_hour) == ("generate", 4, 3, 8.0)
    assert "vllm" not in one.options
    assert wide.options == {**one.options, "vllm": {"gpus": 4}}, "vLLM would not be told to split the model"
    limits = function_limits(prepared.job, prepared.specs)
    narrow_kv, wide_kv = limits["generate"].kv_tokens, limits["generate-tail"].kv_tokens
    assert narrow_kv is not None
    assert wide_kv is not None
    assert limits["generate-tail"].gpus == 4
    # two key heads over four GPUs: each lies on two of them, so that they hold twice as much and not four times
    assert wide_kv == pytest.approx(2 * narrow_kv, rel=1e-3)
    priors = job_priors(prepared.job, prepared.specs)
    assert priors.generate is not None
    assert priors.tail is not None
    assert priors.tail.kv_token_s < priors.generate.kv_token_s
    assert {"generate", "generate-tail"} <= set(priors.start_s)


def test_a_sample_must_have_room_in_the_tails_function_too(file: Path) -> None:
    prepared = prepare(load_job(file, WIDE))
    limits = function_limits(prepared.job, prepared.specs)
    small = limits | {"generate-tail": replace(limits["generate-tail"], kv_tokens=50)}
    check_room(prepared.job, limits, longest_prompt=43)
    with pytest.raises(ConfigError, match=r"have 51 tokens, one replica of generate-tail has room for 50 .*at most 7"):
        check_room(prepared.job, small, longest_prompt=43)


def test_gpus_that_do_not_divide_the_heads_are_refused_before_vllm_does(file: Path) -> None:
    words = [*WIDE, "functions.generate-tail.gpus=3"]
    with pytest.raises(
        ConfigError, match=r"generate-tail.gpus: got 3 for the model's 4 attention heads .wants 1, 2, 4"
    ):
        prepare(load_job(file, words))
