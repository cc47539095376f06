"""Hugging Face models from a directory: causal language models, critics and reward models, any architecture.

A critic or reward model is transformers' sequence classifier with one label: a backbone and a linear `score` [1, H] on
every hidden state. A critic may start from any of three directories: a critic, a reward model (its `score` is taken
over, as InstructGPT does, arXiv:2203.02155, appendix C.4), or a causal model (its `score` starts at zero: every value
is 0 at first, and nothing is random).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from functions.weights.files import weight_files

ALIGNED_BYTES = 64
"""Where torch's own tensors begin. Those of a mapped file begin anywhere, and MKL's products for AVX2 are other bits by
where they do: a model would be another one by the length of its file's header, and after it was parked."""
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """`auto` is cuda when there is one, else cpu. ValueError where the named device is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise ValueError(f"device {name!r}: wants auto, cpu, cuda or cuda:N")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no CUDA device; wants cpu or auto")
    return torch.device(name)


def pick_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}: wants one of {', '.join(DTYPES)}")
    return DTYPES[name]


def micro_batch_default(device: torch.device) -> int:
    """Computed tokens per forward pass where the job names none.

    CPU: 1024 (4 layers of 256 on two cores: within 5 % of the best from 500 to 2300, slower on either side; the
    activations of larger ones leave the cache). GPU: enough to fill it, little enough for its memory.
    """
    return 1024 if device.type == "cpu" else 16384


def load_causal_lm(directory: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """The causal language model of a Hugging Face directory, in eval mode. ValueError, one line, where it is none."""
    model, missing = _load(AutoModelForCausalLM, directory, dtype, device)
    if missing:
        raise ValueError(f"model {directory}: its weights lack {_some(missing)}; is it a {type(model).__name__}?")
    return model


def load_reward_model(directory: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """A sequence classifier with one label, in eval mode. ValueError where the directory has no trained `score`."""
    model, missing = _load(AutoModelForSequenceClassification, directory, dtype, device)
    if missing:
        raise ValueError(f"model {directory}: its weights lack {_some(missing)}; a reward model needs a trained score")
    return model


def load_critic(directory: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """A sequence classifier with one label whose `score` is zero where the directory has none, in eval mode."""
    model, missing = _load(AutoModelForSequenceClassification, directory, dtype, device)
    others = [name for name in missing if not name.startswith("score.")]
    if others:
        raise ValueError(f"model {directory}: its weights lack {_some(others)}")
    if missing:
        with torch.no_grad():
            for parameter in score_head(model).parameters():
                parameter.zero_()
    return model


def empty_causal_lm(directory: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """As `load_causal_lm`, of the directory's configuration alone: parameters are on the meta device, buffers real."""
    return _empty(AutoModelForCausalLM, directory, dtype)


def empty_critic(directory: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """As `load_critic`, without weights."""
    return _empty(AutoModelForSequenceClassification, directory, dtype)


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part that turns tokens into hidden states [B, T, H] (final norm included), without a head."""
    inner: nn.Module = model.base_model
    return inner


def lm_head(model: PreTrainedModel) -> nn.Linear:
    """The output projection [V, H]. ValueError for an architecture whose logits are not one linear map of states."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__}: its output head is {type(head).__name__}, wants a linear layer")
    return head


def score_head(model: PreTrainedModel) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(model).__name__}: has no linear layer `score` and cannot be a critic or reward model")
    return head


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors under its own names; of tied tensors only the one that is stored."""
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in tied}


def checkpoint_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """`tensors` (None: the model's own) under the names of its checkpoint.

    What `save_pretrained` would write: buffers that are recomputed are not in it, a tied output head neither.
    """
    state = own_tensors(model) if tensors is None else dict(tensors)
    result: dict[str, Tensor] = revert_weight_conversion(model, state)
    return result


def checkpoint_names(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, str | None]:
    """The names of `checkpoint_tensors`, in its order, each with the model's own name of the same tensor; None: of a
    tensor that it makes of others."""
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    own = {id(tensor): name for name, tensor in shapes.items()}
    return {name: own.get(id(tensor)) for name, tensor in checkpoint_tensors(model, shapes).items()}


def save_model(model: PreTrainedModel, directory: Path) -> None:
    """Writes a Hugging Face directory (config.json and safetensors; a tokenizer is files of its own)."""
    with _quiet():
        model.save_pretrained(directory, safe_serialization=True)


def row_attention(model: PreTrainedModel) -> str:
    """The attention implementation for rows of samples: sdpa where the architecture allows it, else eager (sdpa
    would leave out soft-capped scores, as Gemma 2 has them, without a word)."""
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


def _empty(auto: Any, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with _quiet(), _parameters_on_meta():
            model: PreTrainedModel = auto.from_config(_config(auto, directory), dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(f"model {directory}: transformers cannot make it: {first}") from error
    vars(model)["_weight_conversions"] = []  # as `from_pretrained` notes it of a checkpoint with the model's own names
    model.eval()
    model.set_attn_implementation(row_attention(model))
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter that a module gets is put on the meta device at once: initialisers then write nothing."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _config(auto: Any, directory: Path) -> PreTrainedConfig:
    extra = {} if auto is AutoModelForCausalLM else {"num_labels": 1}
    return _without_noise(AutoConfig.from_pretrained(directory, local_files_only=True, **extra))


def _load(auto: Any, directory: Path, dtype: torch.dtype, device: str) -> tuple[PreTrainedModel, list[str]]:
    weight_files(directory)  # one clear line for a directory that holds no model
    try:
        with _quiet():
            config = _config(auto, directory)
            model, info = auto.from_pretrained(
                directory, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(f"model {directory}: transformers cannot load it: {first}") from error
    model.eval()
    model.set_attn_implementation(row_attention(model))
    for parameter in model.parameters():
        if parameter.data_ptr() % ALIGNED_BYTES:
            parameter.data = parameter.data.clone()
    return model.to(device), sorted(info["missing_keys"])


def _without_noise(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every dropout and jitter at 0: a step is a function of weights and samples alone, and
    importance ratios compare like with like (TRL and verl train without dropout, too)."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and bars: what they say is checked here and raised."""
    from transformers.utils import logging as hub

    level, bars = hub.get_verbosity(), hub.is_progress_bar_enabled()
    hub.set_verbosity(logging.ERROR)
    hub.disable_progress_bar()
    try:
        yield
    finally:
        hub.set_verbosity(level)
        if bars:
            hub.enable_progress_bar()
