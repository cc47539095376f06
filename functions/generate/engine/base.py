"""The engine protocol: what samples tokens.

Three engines: torch (generate/torch/engine.py), transformers (generate/torch/transformers_engine.py), which knows every
architecture, and vLLM (generate/vllm/engine.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from functions.algorithms.penalties import Penalties
from functions.algorithms.truncation import Truncation
from functions.base.samples import Finish
from functions.base.wire import Version
from functions.generate.engine.keys_values import KeysValues, Layout
from functions.weights.local_copy import Changes


@dataclass(frozen=True)
class Sampling:
    """The distribution that is sampled from. `temperature` 0 is greedy (log-probabilities are then those at 1).

    `seed` is the job's and step's; each sample draws from a stream of its own, keyed by (seed, group, index,
    position), so that a sample does not depend on its neighbours, and a cut sample continues the same stream.
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    ignore_eos: bool = False
    """Sample on to the full length (benchmarks)."""
    keep_from: int | None = None
    """Samples that stop, with so many tokens or more (their prompt's included), come with their keys and values where
    the engine has them then (torch): their next turn goes on with these. None: none does."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that no response may have."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """What ends a response besides the model's own end."""
    routed_experts: bool = False
    """Samples come with the experts that their tokens' routers chose (transformers alone has them)."""

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.top_p, self.top_k, self.min_p)

    @property
    def penalties(self) -> Penalties:
        return Penalties(self.repetition_penalty, self.banned)


@dataclass(frozen=True)
class Request:
    """One sample to generate, or to go on with: `response` and `logprobs` hold what earlier attempts sampled."""

    number: int
    """The engine's caller's name for it; comes back in the Sample."""
    group: int
    index: int
    prompt: npt.NDArray[np.int32]
    """[prompt tokens]; requests of one group with equal prompts share their prefill."""
    response: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    cache: KeysValues | None = None
    """Of prompt and response without its last token, or without more of its end (what follows a turn), in the engine's
    `cache_layout`: they are used instead of computed, the rest is computed. Never there without a response."""
    experts: npt.NDArray[Any] | None = None
    """As SampleBatch has them, of `response`."""


@dataclass(frozen=True)
class Sample:
    """A finished (or, after a cut, unfinished) request: the whole response, earlier tokens included."""

    number: int
    response: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """ln p of each token under the distribution that it was sampled from (after temperature, top-k, top-p)."""
    finish: Finish
    version: int
    cache: KeysValues | None = None
    """Of an unfinished sample with a response, or one that stopped (`Sampling.keep_from`): what a Request for the rest
    of it takes. None where the engine has none: of a sample that it had not begun, or of any (`cache_layout`)."""
    experts: npt.NDArray[Any] | None = None
    """Of the response, as SampleBatch has them, where they are asked for."""


@dataclass(frozen=True)
class EngineStats:
    """Counts of one `generate`, for the latency model and the metrics."""

    prefill_tokens: int = 0
    """Prompt tokens computed; with prefix sharing fewer than the samples' prompt tokens added up."""
    shared_tokens: int = 0
    """Prompt tokens not computed because another sample had them."""
    decode_tokens: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    moved_tokens: int = 0
    """Tokens whose keys and values came with their request: neither computed nor shared."""
    moved_s: float = 0.0
    """Of putting these into their place."""

    def plus(self, **more: float) -> Self:
        return replace(self, **{name: getattr(self, name) + n for name, n in more.items()})


class Engine(Protocol):
    """Holds one version of the policy and samples from it."""

    def load(self, version: Version, model_dir: Path, changes: Changes | None = None) -> int:
        """Makes `model_dir` (a Hugging Face directory) the policy. Does nothing if that version is held already. The
        bytes that processes of its own have read from the exchange for it.

        `changes` lead to it from an earlier version: an engine that holds that one may apply them to what it holds
        instead of reading the directory.
        """

    def generate(self, requests: Sequence[Request], sampling: Sampling, stop: Callable[[], bool]) -> Iterator[Sample]:
        """Yields samples as they finish. When `stop()` turns true, yields the rest as UNFINISHED and ends; each of
        these with its keys and values, made when it is asked for, so that a caller need not hold all of them at once.

        Raises ValueError for a request that does not fit (prompt plus response longer than the model's context).
        """

    @property
    def cache_layout(self) -> Layout | str:
        """What the keys and values in requests must be like, and those in samples are, for the policy that is held; or
        why there can be none (in words), and samples that were cut are computed again where they go on."""

    @property
    def stats(self) -> EngineStats:
        """Counts of the latest `generate`."""

    def park(self, weights: Path | None) -> None:
        """Leaves the accelerator, and on a CPU private memory: weights to pinned or mapped host memory, keys and values
        to nowhere. An engine that can read them again need not keep its weights where they lie as files in `weights`.
        """

    def unpark(self) -> None:
        """Back to what was held when it parked. Whoever calls it checks that (HeldPolicy)."""

    def close(self) -> None: ...
