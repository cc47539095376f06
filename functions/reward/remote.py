"""A remote scorer in OpenRLHF's form (openrlhf/cli/serve_rm.py, examples/python/reward_func.py).

    POST URL  {"query": [prompt + response, ...], "prompts": [...], "labels": [...]}
    <-        {"rewards": [number, ...], "scores": [number, ...], "extra_logs": {name: [number, ...]}}

`rewards` are the scores; `scores`, where given, become the column "acc" (they are what OpenRLHF filters by), and
`extra_logs` columns of their names.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from functions.base.rows import ground_truths
from functions.call.function import FatalError, RetryableError
from functions.call.meter import Meter
from functions.reward.scorer import Failed, Item, Scored, checked


@dataclass(frozen=True)
class Remote:
    url: str
    timeout_s: float
    """For one sample; a batch has as much for each of its samples."""
    tick: Callable[[], None]
    meter: Meter = field(default_factory=Meter)
    """The trace that its requests carry on (`traceparent`)."""

    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        self.tick()
        labels = [next(ground_truths(item.row), None) for item in items]
        query = {"query": [item.text for item in items], "prompts": [item.prompt for item in items], "labels": labels}
        answer = self._post(query)
        rewards = self._column(answer, "rewards", len(items))
        columns: dict[str, list[Any]] = {"score": rewards}
        if answer.get("scores") is not None:
            columns["acc"] = self._column(answer, "scores", len(items))
        extra = answer.get("extra_logs") or {}
        for name in extra:
            columns[name] = self._column(extra, name, len(items))
        return [
            checked({name: values[i] for name, values in columns.items()}, self.url, item)
            for i, item in enumerate(items)
        ]

    def _post(self, query: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if self.meter.traceparent is not None:
            headers["traceparent"] = self.meter.traceparent
        request = urllib.request.Request(self.url, json.dumps(query).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s * len(query["query"])) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            with error:
                said = " ".join(error.read(300).decode(errors="replace").split())
            message = f"remote scorer {self.url} answered {error.code}: {said}"
            raise (RetryableError if error.code >= 500 or error.code in (408, 429) else FatalError)(message) from error
        except (TimeoutError, urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise RetryableError(
                f"remote scorer {self.url} does not answer: {reason or type(error).__name__}"
            ) from error
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise FatalError(f"remote scorer {self.url} answered no JSON: {body[:80]!r}") from error
        if not isinstance(answer, dict):
            raise FatalError(f"remote scorer {self.url} answered {type(answer).__name__}, wants an object")
        return answer

    def _column(self, answer: dict[str, Any], name: str, count: int) -> list[Any]:
        values = answer.get(name)
        if not isinstance(values, list) or len(values) != count:
            got = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
            raise FatalError(f"remote scorer {self.url} answered {got} as {name!r} for {count} samples; wants a list")
        return values
