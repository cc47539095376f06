"""verl's perf/mfu/*: the share of the GPUs' peak that the model's own arithmetic takes while it is trained.

6 FLOP a parameter and token (forward and backward; attention's quadratic part is left out, so that it is a little low),
over the seconds of the train calls' phase `train`, the GPUs of all ranks and their dense bf16 peak. Told where
`planner.gpu` names the device, whose peak is known then (verl/utils/flops_counter.py).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from orchestrator.job.config import JobConfig
from orchestrator.job.functions import model_directory
from orchestrator.job.roles import BY_NAME
from orchestrator.planner.base import CallObservation
from orchestrator.planner.devices import device
from orchestrator.planner.model_shape import read_shape


class Utilization:
    """`gpus`: of one replica of each train function."""

    def __init__(self, job: JobConfig, gpus: Mapping[str, int]) -> None:
        self._epochs, self._gpus = job.train.epochs, {name: n for name, n in gpus.items() if n}
        self._peak = None if job.planner.gpu is None else 1e12 * device(job.planner.gpu).peak_tflops
        self._parameters: dict[str, float] = {}
        for name in self._gpus if self._peak else ():
            with suppress(OSError, ValueError):  # a model without a shape that can be read has no utilization
                self._parameters[name] = read_shape(model_directory(job, BY_NAME[name].model)[1]).parameters

    def of(self, calls: Iterable[CallObservation]) -> dict[str, float]:
        """perf/mfu/<model> of a step."""
        found: dict[str, float] = {}
        every = list(calls)
        for name, parameters in self._parameters.items():
            trained = [call for call in every if call.function == name]
            seconds = max((b - a for c in trained for phase, a, b in c.phases if phase == "train"), default=0.0)
            if seconds and self._peak:
                flop = 6.0 * parameters * max(c.stats.get("tokens", 0.0) for c in trained) * self._epochs
                gpus = len(trained) * self._gpus[name]
                found[f"perf/mfu/{BY_NAME[name].model}"] = flop / (seconds * gpus * self._peak)
        return found
