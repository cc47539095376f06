"""What the planner is told of the functions: the room for keys and values, and jobs that do not fit it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from functions.call.parallel import Parallel
from orchestrator.base.errors import ConfigError
from orchestrator.job.config import load_job
from orchestrator.job.functions import check_room, function_limits
from orchestrator.job.mesh import rank_bytes
from orchestrator.job.sections import OptimConfig
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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.replicas=4", "train.parallel.tp=3"], "train.parallel: 4 ranks are no multiple of tp 3 x pp 1 x cp 1"),
        (["train.replicas=8", "train.parallel.tp=8"], "train.parallel: tp: got 8, does not divide the model's num_att"),
        (["train.replicas=4", "train.parallel.tp=4"], "tp: got 4, does not divide the model's num_key_value_heads"),
        (["train.replicas=4", "train.parallel.pp=4"], "train.parallel: pp: got 4, the model has 2 layers"),
        (["train.replicas=4", "train.parallel.cp=4"], "cp: got 4, does not divide the model's num_key_value_heads"),
        (["train.replicas=4", "train.parallel.cp=2", "train.parallel.tp=2"], "cp: got 2, wants 1 with tp 2 and pp 1"),
        (["generate.parallel.tp=2"], "generate.parallel: a replica that generates is split by its `gpus`"),
        (["reward.replicas=2", "reward.parallel.tp=2"], "functions.reward.parallel: is for functions that train, or"),
        (["train.memory_gb=1e-4"], r"functions.train: each of 1 ranks needs 0.0 GiB for .*\(wants replicas = "),
        (["train.memory_gb=1e-6"], r"functions.train: .*\(wants a larger device"),
    ],
)
def test_meshes_that_cannot_be_are_refused(file: Path, words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        prepare(load_job(file, ["deterministic=false", *(f"functions.{word}" for word in words)]))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["parallel.tp=3"], "parallel: tp: got 3, does not divide the model's num_attention_heads, which is 4"),
        (["parallel.pp=2"], "parallel: a replica that scores is divided by tp alone"),
        (["parallel.tp=2", "gpus=1"], "gpus: got 1, tp wants 2, one a rank"),
    ],
)
def test_a_replica_that_scores_is_divided_by_tp(file: Path, words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"functions.critic.{line}"):
        prepare(load_job(file, ["recipe=ppo", *(f"functions.critic.{word}" for word in words)]))
    specs = {s.name: s for s in prepare(load_job(file, ["recipe=ppo", "functions.critic.parallel.tp=2"])).specs}
    assert specs["critic"].options["tp"] == 2


def test_the_memory_of_a_mesh() -> None:
    """7B in the shapes of Qwen2.5: 16 bytes a parameter, and what is gathered beside it."""
    config = {
        "model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "vocab_size": 152064,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    }  # fmt: skip
    parameters, ends = 7.616e9, 2 * 152064 * 3584
    assert rank_bytes(parameters, config, 1, Parallel()) == 16 * parameters
    layer = (parameters - ends) / 28
    assert rank_bytes(parameters, config, 8, Parallel()) == pytest.approx(2 * parameters + 8 * (layer + ends))
    assert rank_bytes(parameters, config, 8, Parallel(tp=4)) == pytest.approx(2 * parameters + 8 * (layer / 4 + ends))
    assert rank_bytes(parameters, config, 4, Parallel(tp=4)) == pytest.approx(4 * parameters + 8 * ends)
    muon, offloaded = OptimConfig(optimizer="muon"), OptimConfig(optimizer="muon", optimizer_offload=True)
    assert rank_bytes(parameters, config, 1, Parallel(), muon) == pytest.approx(12 * parameters + 4 * ends)
    assert rank_bytes(parameters, config, 1, Parallel(), offloaded) == 8 * parameters


def test_a_mesh_wants_a_known_architecture_and_tp_no_adapters() -> None:
    with pytest.raises(ValueError, match=r"type 'gpt2' is not divided by tp, pp or cp, only by dp"):
        Parallel(tp=2).check({"model_type": "gpt2"})
    with pytest.raises(ValueError, match=r"tp: wants model.lora_rank = 0"):
        Parallel(tp=2).check({"model_type": "llama"}, lora=True)
    Parallel().check({"model_type": "gpt2"}, lora=True)
