"""What runs inside vLLM's worker process: new weights in place, and on a CPU what vLLM gets wrong there.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`); its methods are called by name through
`collective_rpc`, so nothing is pickled. Read against vLLM 0.32; on a CPU four things differ from a GPU:

- Linear layers pack their weights and empty the tensor, and a tied output head packs a copy that no reload reaches
  (log-probabilities off by a nat, no error). Here the weights stay what they are and layers multiply with them.
- A request with a seed crashes in a chunked prefill ("CPU Generator does not use offset"), draws only 31 bits a
  token, and cannot go on where a cut left it. Here the noise of a token is a pure function of the sample's stream and
  the token's position, as vLLM's second model runner does it on a GPU.
- Ranks of sampled tokens are counted by a function that torch compiles at the first token: 5 s of CPU, and threads.
  Nobody reads them here.
- Triton kernels are replaced by a walk over every loaded module: done once (`preload`), not at each start.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.model_executor.layers.utils
import vllm.v1.sample.sampler
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from functions.generate.engine.sampling import bits
from functions.generate.vllm import patch as vllm_patch
from functions.generate.vllm import slices  # noqa: F401  # registers its loader
from functions.generate.vllm.blocks import CacheMethods
from functions.models.parked import HostMemory, give_back, tensors_in

STREAM = "rlhf_stream"
"""Key in a request's `extra_args`: [stream key (64 bits), response tokens that the prompt contains]."""


class WorkerExtension(CacheMethods):
    """Methods added to vLLM's worker. Names must not meet those of the worker: all begin with `rlhf_`."""

    model_runner: Any

    def rlhf_start(self) -> None:
        """Once, after the model has been loaded."""
        self.rlhf_host, self.rlhf_dropped = HostMemory(), list[tuple[torch.UntypedStorage, int]]()
        if current_platform.is_cpu():
            self.model_runner.sampler.topk_topp_sampler.forward = _positioned(self.model_runner)

    def rlhf_reload(self, directory: str) -> int:
        """The weights of `directory` (same names and shapes), in place. Any error leaves them half new. The bytes that
        were read for it from the exchange."""
        model = self.model_runner.get_model()
        model.rlhf_read = 0
        self.model_runner.reload_weights(weights_path=directory)
        self.rlhf_check_head()
        return int(model.rlhf_read)

    def rlhf_patch(self, directory: str, deltas: Sequence[Sequence[bytes]]) -> bool:
        """The weights of `directory` by `deltas` from those that are held. False where vLLM cannot do that with this
        model, or they were others: the weights may then be anything, and want `rlhf_reload`."""
        config = self.model_runner.model_config
        if config.quantization is not None or config.is_moe or config.use_mla:
            return False  # these keep their weights in another form than the checkpoint, or others derived from them
        try:
            applied = vllm_patch.apply(self.model_runner.get_model(), deltas, Path(directory))
        except (ValueError, TypeError, NotImplementedError):
            return False
        self.rlhf_check_head()
        return applied

    def rlhf_park(self) -> None:
        """On a CPU what vLLM's sleep does on a GPU: weights to a mapped file, keys and values dropped."""
        self.rlhf_host.park(tensors_in(self.model_runner.get_model()))
        caches = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_in(self.model_runner.kv_caches)}
        self.rlhf_dropped = [(storage, storage.nbytes()) for storage in caches.values()]
        for storage, _ in self.rlhf_dropped:
            storage.resize_(0)
        give_back()

    def rlhf_unpark(self) -> None:
        self.rlhf_host.unpark()
        for storage, size_bytes in self.rlhf_dropped:
            storage.resize_(size_bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        self.rlhf_dropped = []

    def rlhf_check_head(self) -> None:
        model = self.model_runner.get_model()
        if getattr(model.config, "tie_word_embeddings", False):
            named = dict(model.named_parameters(remove_duplicate=False))
            both = ("lm_head.weight", "embed_tokens.weight")
            if len({tensor.data_ptr() for name, tensor in named.items() if name.endswith(both)}) > 1:
                raise RuntimeError("the output head no longer shares the embedding's weights after the update")


Forward = Callable[[Tensor, dict[int, torch.Generator], Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


def _positioned(runner: Any) -> Forward:
    """vLLM's sampler for CPUs with noise by stream and position: argmax of logits + Gumbel(stream, position, token)."""

    def forward(
        logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = apply_top_k_top_p(logits, k, p)
        keys, positions = [], []
        for name in runner.input_batch.req_ids:
            state = runner.requests[name]
            key, given = state.sampling_params.extra_args[STREAM]
            keys.append(key)
            positions.append(given + len(state.output_token_ids))
        seeds = bits(np.array(keys, np.uint64), np.array(positions, np.int64)) >> np.uint64(1)
        noise = torch.from_numpy(seeds.astype(np.int64))
        return torch.ops._C.fused_gumbel_argmax(logits.float(), noise), logits.log_softmax(-1, dtype=torch.float32)

    return forward


def _plain(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _no_ranks(logprobs: Tensor, _sampled: Tensor) -> Tensor:
    return torch.ones(len(logprobs), dtype=torch.int64)


if current_platform.is_cpu():  # vLLM imports this module in its worker before it builds the model
    vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = _plain
    vllm.v1.sample.sampler.batched_count_greater_than = _no_ranks
