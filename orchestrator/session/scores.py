"""What held-out samples say, by verl's names (verl/trainer/ppo/metric_utils.py), and which step was best.

val-core/<data_source>/acc/mean@n       mean accuracy of n samples ("acc" of the scorer, else the score)
val-core/<data_source>/acc/best@k/mean  expected best of k of the n samples: pass@k where accuracies are 0 and 1
val-core/<data_source>/acc/maj@n/mean   accuracy of the answer that most of the n samples give (evaluations)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

from functions.base.wire import Json
from orchestrator.base.errors import RunError
from orchestrator.job.prompts import PromptSet
from orchestrator.run.journal import Record


def best_of(values: Sequence[float], k: int) -> float:
    """Expected maximum of `k` of the values, drawn without replacement (Chen et al., arXiv:2107.03374, eq. 1)."""
    ordered, n = sorted(values), len(values)
    return sum(value * comb(i, k - 1) for i, value in enumerate(ordered)) / comb(n, k)


def validation_metrics(
    prompts: PromptSet, accuracy: Mapping[int, Sequence[float]], scores: Mapping[int, Sequence[float]], n: int
) -> dict[str, float]:
    """By data source, of the prompts' groups."""
    metrics: dict[str, float] = {}
    for source, groups in _by_source(prompts).items():
        for name, values in (("val-core/{}/acc/mean@{}", accuracy), ("val-core/{}/reward/mean@{}", scores)):
            flat = [value for group in groups for value in values.get(group, ())]
            if flat:
                metrics[name.format(source, n)] = sum(flat) / len(flat)
        for k in (2**i for i in range(n.bit_length()) if 1 < 2**i <= n):
            enough = [found for group in groups if len(found := accuracy.get(group, ())) >= k]
            if enough:
                best = sum(best_of(each, k) for each in enough) / len(enough)
                metrics[f"val-core/{source}/acc/best@{k}/mean"] = best
    return metrics


def majority_metrics(prompts: PromptSet, texts: Sequence[Json], n: int) -> dict[str, float]:
    """Of the scored samples' texts: the answer ("pred", else the response) that most of a group give; the first one
    among equals."""
    groups: dict[int, list[Json]] = {}
    for text in sorted(texts, key=lambda text: (text["group"], text["index"])):
        if text.get("score") is not None:
            groups.setdefault(text["group"], []).append(text)
    metrics = {}
    for source, members in _by_source(prompts).items():
        right = list[float]()
        for samples in (groups[group] for group in members if group in groups):
            said = [str(text.get("pred", text["response"])).strip() for text in samples]
            chosen = said.index(Counter(said).most_common(1)[0][0])
            accuracy: Any = samples[chosen].get("acc", samples[chosen]["score"])
            right.append(float(accuracy))
        if right and n > 1:
            metrics[f"val-core/{source}/acc/maj@{n}/mean"] = sum(right) / len(right)
    return metrics


def _by_source(prompts: PromptSet) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for group, row in zip(prompts.groups, prompts.rows, strict=True):
        found.setdefault(row["data_source"], []).append(group)
    return dict(sorted(found.items()))


def best_record(records: Sequence[Record], metric: str) -> Record | None:
    """The first of the records with the highest `metric`; None: none has it."""
    seen = [record for record in records if metric in record.history["metrics"]]
    return max(seen, key=lambda record: (record.history["metrics"][metric], -record.step), default=None)


def check_metric(metrics: Mapping[str, float], metric: str) -> None:
    """Raises RunError where a validation has other metrics than the one that checkpoints are chosen by."""
    if metric not in metrics:
        found = ", ".join(sorted(name for name in metrics if name.startswith("val-core/"))) or "none"
        raise RunError(f"checkpoints.best: no metric {metric!r} in this job's validation; it has {found}")


def stopped_early(records: Sequence[Record], metric: str, patience: int) -> bool:
    """Whether the last `patience` validations were no better than one before them."""
    seen = [record.history["metrics"][metric] for record in records if metric in record.history["metrics"]]
    return len(seen) > patience and max(seen[-patience:]) <= max(seen[:-patience])
