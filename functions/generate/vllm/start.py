"""Starts vLLM: what can be loaded beforehand, the engine's arguments, and its failures in one line each.

The engine runs in this process (no engine-core process, no compiled graph on a CPU): forked from a parent that called
`preload`, it samples its first token in a fraction of a second (bench/vllm_cold_start.py). Settings that are not given
follow the model and the machine. On a GPU vLLM measures how much memory the KV cache may have, and keeps that, its
kernels and its graphs under VLLM_CACHE_ROOT: put it on a volume.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from functions.weights.local_copy import SOURCE

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_MB = 1 << 20
_CPU_BLOCK = 32
"""Tokens of a block on a CPU, the fewest that its fast kernels take. With vLLM's 128 nothing is faster, shorter prompts
share nothing, and of a sample that moves up to 127 tokens are computed again."""
_PRELOADED = ("llama", "qwen2", "qwen3", "gemma3", "mistral")
"""Model families whose modules `preload` imports; any other is imported when it is first loaded."""


@dataclass(frozen=True)
class VllmSettings:
    """`context` is the most tokens of prompt and response (the model's own where None); `slots` the most samples at
    once; `kv_cache_mb` the KV cache's size (None: measured on a GPU, by `context` and `slots` on a CPU);
    `memory_fraction` the part of the GPU's memory that vLLM may take; `lora_rank` the highest rank of an adapter
    (0: no adapters); `gpus` over which the model is split; `eager` without compilation and graphs (None: on a CPU).
    """

    dtype: str = "float32"
    context: int | None = None
    slots: int = 256
    kv_cache_mb: int | None = None
    memory_fraction: float = 0.9
    lora_rank: int = 0
    gpus: int = 1
    eager: bool | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {self.dtype!r}: wants float32, bfloat16 or float16")
        for name in ("context", "slots", "kv_cache_mb", "gpus"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, wants 1 or more")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction:g}, wants more than 0 and at most 1")
        if self.lora_rank not in (0, 1, 8, 16, 32, 64, 128, 256, 320, 512):
            raise ValueError(f"lora_rank is {self.lora_rank}, wants 0 or one of 1, 8, 16, 32, 64, 128, 256, 320, 512")


def environment() -> None:
    """What vLLM reads when it is imported. A value that the user has set stays, except the one that must hold."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else all replicas of a machine sit on one core


def preload() -> None:
    """Imports all that a start needs, in one thread and without touching a GPU: call it in a parent before it forks."""
    environment()
    for name in (
        "vllm.v1.engine.llm_engine",
        "vllm.v1.executor.uniproc_executor",
        "vllm.model_executor.model_loader",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.v1.core.sched.scheduler",
        "functions.generate.vllm.engine",
    ):
        importlib.import_module(name)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        importlib.import_module("vllm.v1.worker.cpu_worker")
        importlib.import_module("vllm.v1.worker.cpu_model_runner")
        importlib.import_module("vllm.v1.attention.backends.cpu_attn")
        importlib.import_module("functions.generate.vllm.worker")
        for family in _PRELOADED:
            importlib.import_module(f"vllm.model_executor.models.{family}")
        _register_kernels_once()


def unloaded() -> str | None:
    """What keeps vLLM's compiled part from loading, in one line; None: nothing. The driver's library is the node's.

    vLLM itself only warns of it, and fails much later over an operation that is not there.
    """
    import torch  # noqa: F401  # whose libraries it is linked to

    try:
        importlib.import_module("vllm._C")
    except ImportError as error:
        missing = re.match(r"(\S+): cannot open shared object file", str(error))
        if missing and missing[1] == "libcuda.so.1":
            return None
        why = f"{missing[1]} is missing" if missing else " ".join(str(error).split())[:200]
        return f"vLLM's compiled part does not load: {why}"
    return None


def device_type() -> str:
    """`cpu` or `cuda`: what the installed vLLM was built for."""
    environment()
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def knows(config_json: dict[str, Any]) -> bool:
    """Whether vLLM has a class of its own for one of the model's architectures."""
    environment()
    from vllm import ModelRegistry

    return any(name in ModelRegistry.models for name in config_json.get("architectures") or [])


def start(model_dir: Path, settings: VllmSettings) -> LLMEngine:
    """An engine that holds the model of `model_dir`, or any weights where those are holes: then it has to reload.
    ValueError, one line, where it cannot."""
    environment()
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    config_json = json.loads((model_dir / "config.json").read_bytes())
    cpu = current_platform.is_cpu()
    lora: dict[str, Any] = {}
    if settings.lora_rank:
        lora = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": settings.lora_rank}
    with _explained(model_dir, config_json, settings):
        _register(config_json)
        if cpu:
            _register_kernels_once()
        if holes := (model_dir / SOURCE).is_file():
            importlib.import_module("functions.generate.vllm.slices")
        arguments = EngineArgs(
            model=str(model_dir),
            skip_tokenizer_init=True,
            dtype=settings.dtype,
            max_model_len=settings.context,
            max_num_seqs=settings.slots,
            kv_cache_memory_bytes=None if settings.kv_cache_mb is None else settings.kv_cache_mb * _MB,
            gpu_memory_utilization=settings.memory_fraction,
            enforce_eager=cpu if settings.eager is None else settings.eager,
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            block_size=_CPU_BLOCK if cpu else None,
            distributed_executor_backend="uni" if settings.gpus == 1 else "mp",
            tensor_parallel_size=settings.gpus,
            load_format="rlhf_slices" if holes else "auto",
            worker_extension_cls="functions.generate.vllm.worker.WorkerExtension",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            generation_config="vllm",  # the job's sampling, not the model author's
            limit_mm_per_prompt={},
            enable_sleep_mode=not cpu,
            **lora,
        )
        config = arguments.create_engine_config()
        if cpu:
            _check_heads(config)
        if cpu and settings.kv_cache_mb is None:
            config.cache_config.kv_cache_memory_bytes = _cpu_kv_bytes(config, settings)
        engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
        engine.collective_rpc("rlhf_start")
    return engine


def _check_heads(config: Any) -> None:
    """vLLM looks for a kernel at the first token only, and fails there."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = config.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes and not config.model_config.use_mla:
        listed = ", ".join(map(str, sizes))
        have = f"vLLM has no attention for heads of {size} on a CPU (it has {listed})"
        raise ValueError(f'{have}; engine = "torch" or "transformers" would do')


def _cpu_kv_bytes(config: Any, settings: VllmSettings) -> int:
    """Room for every slot's whole context, but at most 256 MB (which is zeroed at the start: 0.1 s of CPU) and a
    quarter of the free memory; and for two samples at least."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    heads, size = model.get_num_kv_heads(parallel), model.get_head_size()
    token_bytes = 2 * model.get_num_layers(parallel) * heads * size * model.dtype.itemsize
    sample_bytes = token_bytes * block * -(-model.max_model_len // block)
    available = get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory
    return int(max(2 * sample_bytes, min(settings.slots * sample_bytes, 256 * _MB, available // 4)))


def _register(config_json: dict[str, Any]) -> None:
    """Imports the model's class here: left to itself, vLLM looks at it in another process, for seconds."""
    from vllm import ModelRegistry

    for architecture in config_json.get("architectures") or []:
        known = ModelRegistry.models.get(architecture)
        if known is not None and hasattr(known, "module_name"):
            ModelRegistry.register_model(architecture, known.load_model_cls())


_kernels_registered = False


def _register_kernels_once() -> None:
    """vLLM does this at each start, at a third of its cost; the second time there is nothing left to replace."""
    global _kernels_registered
    from vllm.platforms import current_platform

    if not _kernels_registered:
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _cls: None)
        _kernels_registered = True


@contextlib.contextmanager
def _explained(model_dir: Path, config_json: dict[str, Any], settings: VllmSettings) -> Iterator[None]:
    """Turns what vLLM raises for a model or setting it cannot serve into a ValueError of one line."""
    try:
        yield
    except (
        ValueError, RuntimeError, AssertionError, OSError, NotImplementedError, KeyError, TypeError, AttributeError,
        ImportError,
    ) as error:  # fmt: skip
        text = " ".join(str(error).split())
        if isinstance(error, AttributeError | ImportError) and (lost := unloaded()) is not None:
            raise ValueError(lost) from error
        raise ValueError(f"model {model_dir}: {_reason(text, config_json, settings) or text[:300]}") from error


def _reason(text: str, config_json: dict[str, Any], settings: VllmSettings) -> str | None:
    names = ", ".join(config_json.get("architectures") or []) or config_json.get("model_type", "?")
    unknown = ("not supported for now", "does not recognize this architecture", "failed to be inspected")
    if any(part in text for part in unknown):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        known = config_json.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        other = 'engine = "transformers" would do' if known else "transformers does not know it either"
        return f"vLLM has no {names}; {other}"
    if "derived max_model_len" in text:
        found = re.search(r"max_position_embeddings=(\d+)", text)
        return f"context {settings.context} is longer than the model's{f' {found[1]}' if found else ''} tokens"
    if "KV cache" in text and "max seq len" in text:
        found = re.search(r"max seq len \((\d+)\).*?\(?([\d.]+) GiB KV cache is needed.*?\(([\d.]+) GiB\)", text)
        sizes = f": one sample of {found[1]} tokens needs {found[2]} GiB, there are {found[3]}" if found else ""
        return f"too little memory for the KV cache{sizes}; lower context, or raise kv_cache_mb or memory_fraction"
    if "Available memory" in text or "Free memory on device" in text or "No available memory" in text:
        return f"too little memory for model and KV cache: {text[:200]}"
    return None
