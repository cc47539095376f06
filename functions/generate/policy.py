"""The version of the policy that a replica's engine holds, and how it gets the next one.

whole model    the replica's copy of the weights follows by deltas (weights/local_copy.py), the engine loads it
adapters       swapped over their base, which stays in the engine (vLLM with a lora_rank)

An engine that comes back from parking first samples a canary, as it did before: where that differs it holds something
else than it should (vLLM's sleep mode has failed so, without an error: vllm#29341, vllm#48310), and is given up.
"""

from pathlib import Path

import numpy as np

from functions.base.wire import Version
from functions.call.function import Context, FatalError, ReplicaBroken
from functions.generate.engine.base import Engine, Request, Sample, Sampling
from functions.generate.engines import Choice, EngineOptions, choose, make_engine
from functions.weights.adapters import write_adapter
from functions.weights.local_copy import LocalCopy, directory_name
from functions.weights.manifest import Manifest, label, read_manifest
from functions.weights.materialize import materialize, write_files

CANARY = Request(0, 0, 0, np.array([0, 1, 1, 0], np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
"""Tokens that every vocabulary has; greedily two more: one after the prefill, one after a step."""
CANARY_BOUND = 0.01
"""Nats by which its log-probabilities may differ where the engine does not promise their last bits."""


class HeldPolicy:
    def __init__(self, engine: str, options: EngineOptions) -> None:
        self._wanted, self._options = engine, options
        self.engine: Engine | None = None
        self._choice: Choice | None = None
        self._version: Version | None = None
        self._swaps_adapters = engine == "vllm" and bool(options.vllm.get("lora_rank"))
        self._base: Version | None = None
        """The version whose whole weights the engine holds: an adapter's base, where adapters are swapped."""
        self._copy: LocalCopy | None = None
        self._canary: tuple[Version, Sample] | None = None

    def hold(self, version: Version, context: Context) -> tuple[Engine, Choice]:
        """The engine with `version` loaded. FatalError for a model that it cannot run."""
        if self.engine is not None and self._choice is not None and self._version == version:
            return self.engine, self._choice
        self._version = None
        root = Path(context.scratch) / "policy"
        copy = self._copy = self._copy or LocalCopy(root)
        try:
            manifest = read_manifest(context.exchange, version) if self._swaps_adapters else None
            if manifest is not None and manifest.adapter is not None:
                copy.drop()
                engine, choice = self._with_adapter(manifest, manifest.adapter.base, root, context)
                copy.drop()  # the engine holds the weights now
            else:
                engine, choice = self._with_whole(version, copy, context)
        except (ValueError, OSError) as error:
            copy.drop()
            raise FatalError(f"policy {version.prefix}: {error}") from error
        self._version = version
        return engine, choice

    def park(self) -> int | None:
        """See Parks. An engine without a version (its last load failed) is closed."""
        if self.engine is None or self._version is None:
            if self.engine is not None:
                self.engine.close()
            self.engine = self._choice = None
            return None
        if self._canary is None or self._canary[0] != self._version:
            self._canary = self._version, _sampled(self.engine)
        self.engine.park(None if self._copy is None else self._copy.directory)
        return self._version.number

    def unpark(self) -> None:
        """Raises ReplicaBroken where the engine does not come back, or is not what it was."""
        if self.engine is None or self._canary is None:
            return
        version, before = self._canary
        try:
            self.engine.unpark()
            now = _sampled(self.engine)
        except Exception as error:
            raise ReplicaBroken(f"the engine does not wake up: {type(error).__name__}: {error}") from error
        off = np.abs(now.logprobs - before.logprobs)
        bound = 0.0 if self._options.deterministic else CANARY_BOUND
        if not (np.array_equal(now.response, before.response) and (off <= bound).all()):
            raise ReplicaBroken(
                f"the canary of {label(version)} differs after waking: tokens {now.response.tolist()} with "
                f"log-probabilities {now.logprobs.tolist()}, before {before.response.tolist()} with "
                f"{before.logprobs.tolist()}"
            )

    def _with_whole(self, version: Version, copy: LocalCopy, context: Context) -> tuple[Engine, Choice]:
        self._base = None
        opened = context.opened if self._ranks_read(version, context) else None
        try:
            arrival = copy.bring(context.exchange, version, context.phase, opened)
        finally:
            if copy.altered and self.engine is not None:  # on a CPU, its weights may be the pages of these files
                self.engine.close()
                self.engine = self._choice = None
        engine, choice = self._started(arrival.directory, context)
        with context.phase("load"):
            context.meter.moved(bytes_in=engine.load(version, arrival.directory, arrival.changes))
        copy.settle()
        self._base = version
        return engine, choice

    def _with_adapter(self, manifest: Manifest, whole: Version, root: Path, context: Context) -> tuple[Engine, Choice]:
        """Under `root`, which the caller deletes."""
        directory, base = root / directory_name(manifest.version), root / directory_name(whole)
        if self._base != whole:
            with context.phase("fetch"):
                materialize(context.exchange, whole, base)
        engine, choice = self._started(base, context)
        with context.phase("load"):
            write_adapter(context.exchange, manifest, directory, str(base))
            self._base = None
            engine.load(manifest.version, directory)
        self._base = whole
        return engine, choice

    def _started(self, directory: Path, context: Context) -> tuple[Engine, Choice]:
        """The engine; chosen for the model of `directory` and made where there is none yet."""
        if self.engine is None or self._choice is None:
            with context.phase("start engine"):
                self._choice = self._choice or choose(self._wanted, directory, self._options)
                self.engine = make_engine(self._choice, self._options)
        return self.engine, self._choice

    def _ranks_read(self, version: Version, context: Context) -> bool:
        """Whether the engine's ranks read the weights themselves: vLLM's, of a replica with several GPUs."""
        if self._options.vllm.get("gpus", 1) == 1 or self._options.vllm.get("lora_rank"):
            return False
        if self._choice is None:
            directory = Path(context.scratch) / "config"
            write_files(context.exchange, read_manifest(context.exchange, version), directory)
            self._choice = choose(self._wanted, directory, self._options)
        return self._choice.name == "vllm"


def _sampled(engine: Engine) -> Sample:
    [sample] = engine.generate([CANARY], Sampling(2, temperature=0.0, ignore_eos=True), lambda: False)
    return sample
