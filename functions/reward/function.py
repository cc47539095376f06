"""The reward function: operation `score`.

inputs   samples (SampleBatch, finished), rows (JSON: {"<group>": row of the data set})
weights  policy (for its tokenizer), model (with score = "model")
params   score       rule:<name> | path/to/file.py:function | package.module:function | model | http(s)://...
         scorers     instead of it, several by name, each as `score`; then with `weights`
         on_error    "fail": a sample without a score fails the call; "drop": it is left out and listed in `failed`
         timeout_s   for one sample, default 60
         weights     of several numbers that the scorer gives: "score" is then their weighted sum
         micro_batch_tokens   of the reward model, padding included, default 16384
         sandbox      where model-written code runs: "local", or the URL of a service in SandboxFusion's form; rule:code
                      needs it, and a scorer with a parameter `sandbox` is given it (functions/sandbox/program.py)
         sandbox_timeout_s, sandbox_memory_mb   of one program, default 10 and 1024
done     ref Columns: "score" and every other number that the scorer gave, of the samples that have a score
         data {"failed": [{"group", "index", "message"}], "texts": Ref of JSON lines, "samples", "tokens" (prompts'
         included), "seconds": of the scorer, "load_s" (functions/server/preload.py)}
ahead    as a replica starts, it loads the reward model that its function's hint names
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from functions.base.rows import ground_truths
from functions.base.samples import Columns, Finish, SampleBatch
from functions.base.wire import Call, Event, Load, Version
from functions.call.function import Context, FatalError, RetryableError
from functions.call.inputs import read_samples
from functions.call.params import parse
from functions.reward import python
from functions.reward.remote import Remote
from functions.reward.rules import CODE_RULES
from functions.reward.scorer import Failed, Item, Scored, Scorer, Several
from functions.sandbox.local import open_sandbox
from functions.sandbox.program import Limits, Sandbox, SandboxError
from functions.weights.manifest import Manifest, label, read_manifest


@dataclass(frozen=True, kw_only=True)
class ScoreParams:
    score: str = ""
    scorers: Mapping[str, str] = field(default_factory=dict)
    on_error: Literal["fail", "drop"] = "fail"
    timeout_s: float = 60.0
    micro_batch_tokens: int = 16384
    sandbox: str = ""
    sandbox_timeout_s: float = Limits.timeout_s
    sandbox_memory_mb: int = Limits.memory_mb
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.score) == bool(self.scorers) or (self.scorers and not self.weights):
            raise ValueError("wants score, or scorers and weights")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s:g}, wants a number of seconds above 0")
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens is {self.micro_batch_tokens}, wants 1 or more")
        if self.sandbox not in ("", LOCAL) and not self.sandbox.startswith(("http://", "https://")):
            raise ValueError(f"sandbox is {self.sandbox!r}, wants {LOCAL!r} or a URL")
        Limits(timeout_s=self.sandbox_timeout_s, memory_mb=self.sandbox_memory_mb)


LOCAL = "local"


class RewardFunction:
    """Keeps tokenizers and the reward model between calls. `device` and `dtype` are the reward model's; `tp`: on how
    many devices of this replica it lies."""

    def __init__(self, *, device: str = "auto", dtype: str = "float32", tp: int = 1) -> None:
        self._device, self._dtype, self._tp = device, dtype, tp
        self._tokenizers: dict[str, Tokenizer] = {}
        self._model: Version | None = None
        self._sandbox: tuple[str, Sandbox] | None = None
        self._team: Any = None
        """Where there is a model."""

    def load_ahead(self, load: Load, context: Context) -> None:
        if load.operation != "score" or "model" not in load.weights:
            raise FatalError("the reward function loads for operation 'score', with weights.model")
        with context.phase("load"):
            self._hold(load.weights["model"], context)

    def park(self) -> int | None:
        if self._model is None:
            return None
        from functions.models.team import park

        self._team(park)
        return self._model.number

    def unpark(self) -> None:
        if self._model is not None:
            from functions.models.team import unpark

            self._team(unpark)

    def close(self) -> None:
        """Ends the ranks of this replica; the next call starts them again."""
        if self._team is not None:
            self._team.close()

    def call(self, call: Call, context: Context) -> Iterator[Event]:
        if call.operation != "score":
            raise FatalError(f"the reward function has no operation {call.operation!r}; it has: score")
        params = parse(ScoreParams, call.params, "params of score")
        if "policy" not in call.weights:
            raise FatalError("score wants the version that made the samples as weights.policy, for its tokenizer")
        with context.phase("load"), context.loading.timed():
            scorer = self._scorer(params, call, context)
        with context.phase("read"):
            batch = read_samples(call, context.exchange)
            items = self._items(batch, call, context)
        begun_s = time.perf_counter()
        with context.phase("score"):
            results = _same_columns(_weighted(scorer.score(items), params.weights, items), items)
        seconds = time.perf_counter() - begun_s
        failed = [
            {"group": item.group, "index": item.index, "message": result.message}
            for item, result in zip(items, results, strict=True)
            if isinstance(result, Failed)
        ]
        if failed and params.on_error == "fail":
            more = f" (and {len(failed) - 1} more samples without a score)" if len(failed) > 1 else ""
            again = any(isinstance(result, Failed) and result.retryable for result in results)
            raise (RetryableError if again else FatalError)(f"{failed[0]['message']}{more}")
        context.check()
        scored = [i for i, result in enumerate(results) if isinstance(result, Scored)]
        columns = Columns.of(batch.select(scored), sample=_columns(results))
        texts = b"".join(_text(batch, i, items[i], results[i]) for i in range(len(items)))
        with context.phase("publish"):
            ref = context.exchange.put(f"{call.prefix}scores", columns.encode())
            texts_ref = context.exchange.put(f"{call.prefix}texts.jsonl", texts)
        counts = {"samples": len(batch), "tokens": int(batch.token_counts.sum()), "seconds": round(seconds, 6)}
        yield Event("done", ref, {"failed": failed, "texts": texts_ref.to_json(), **counts, **context.loading.stats()})

    def _scorer(self, params: ScoreParams, call: Call, context: Context) -> Scorer:
        if params.scorers:
            alone = {name: replace(params, score=score, scorers={}) for name, score in params.scorers.items()}
            return Several({name: self._scorer(one, call, context) for name, one in alone.items()})
        score, timeout_s = params.score, params.timeout_s
        if score.removeprefix("rule:") in CODE_RULES:
            return self._code_scorer(params, context)
        if score.startswith("rule:"):
            return python.rule(score.removeprefix("rule:"), timeout_s, context.check)
        if score.startswith(("http://", "https://")):
            return Remote(score, timeout_s, context.check, context.meter)
        if score == "model":
            return self._reward_model(params, call, context)
        given = {} if not params.sandbox else {"sandbox": self._hold_sandbox(params.sandbox)}
        return python.from_file(score, timeout_s, context.check, given)

    def _code_scorer(self, params: ScoreParams, context: Context) -> Scorer:
        from functions.reward import code

        if not params.sandbox:
            raise FatalError(f"{params.score} runs code that a model wrote: it wants reward.sandbox = true, or a URL")
        limits = Limits(timeout_s=params.sandbox_timeout_s, memory_mb=params.sandbox_memory_mb)
        name, remote = params.score.removeprefix("rule:"), params.sandbox != LOCAL
        return code.scorer(name, self._hold_sandbox(params.sandbox), limits, remote=remote, tick=context.check)

    def _hold_sandbox(self, where: str) -> Sandbox:
        if self._sandbox is None or self._sandbox[0] != where:
            if self._sandbox is not None:
                self._sandbox[1].close()
                self._sandbox = None
            try:
                self._sandbox = (where, open_sandbox(None if where == LOCAL else where))
            except SandboxError as error:
                raise RetryableError(str(error)) from error
        return self._sandbox[1]

    def _reward_model(self, params: ScoreParams, call: Call, context: Context) -> Scorer:
        if "model" not in call.weights:
            raise FatalError("score = 'model' needs the version of the reward model as weights.model")
        from functions.reward.model import RewardModel

        version = call.weights["model"]
        self._hold(version, context)
        manifest, policy = (read_manifest(context.exchange, call.weights[role]) for role in ("model", "policy"))
        same = _tokenizer_file(manifest, version) == _tokenizer_file(policy, call.weights["policy"])
        tokenizer = None if same else self._tokenizer(manifest, context)
        name, budget = f"reward model {label(version)}", params.micro_batch_tokens
        return RewardModel(name, self._team, tokenizer, budget, context.check)

    def _hold(self, version: Version, context: Context) -> None:
        """Has every rank hold the reward model `version`."""
        from functions.models.pretrained import pick_device, pick_dtype  # torch: only where there is a model
        from functions.models.team import Team
        from functions.reward.model import hold
        from functions.weights.materialize import materialize

        if self._model == version and self._team.member.held:
            return
        self._model = None
        directory = materialize(context.exchange, version, Path(context.scratch) / "reward-model")
        try:
            self._team = self._team or Team(self._tp, pick_device(self._device))
            self._team(hold, directory, pick_dtype(self._dtype))
        except ValueError as error:
            raise FatalError(str(error)) from error
        self._model = version

    def _items(self, batch: SampleBatch, call: Call, context: Context) -> list[Item]:
        tokenizer = self._tokenizer(read_manifest(context.exchange, call.weights["policy"]), context)
        rows: dict[str, Mapping[str, Any]] = {}
        for ref in call.inputs.get("rows", ()):
            rows |= json.loads(context.exchange.get(ref))
        prompts, responses = batch.prompts.rows(), batch.responses.rows()
        prompt_texts = tokenizer.decode_batch([p.tolist() for p in prompts], skip_special_tokens=False)
        texts = tokenizer.decode_batch([r.tolist() for r in responses], skip_special_tokens=True)
        whole = tokenizer.decode_batch([r.tolist() for r in responses], skip_special_tokens=False)
        items = []
        for i, ((group, index), prompt) in enumerate(zip(batch.keys, batch.prompt.tolist(), strict=True)):
            if str(group) not in rows:
                raise FatalError(f"the rows of call {call.id} lack group {group}")
            row = rows[str(group)]
            before = prompt_texts[prompt]
            items.append(Item(group, index, before, texts[i], before + whole[i], row, prompts[prompt], responses[i]))
        return items

    def _tokenizer(self, manifest: Manifest, context: Context) -> Tokenizer:
        checksum = _tokenizer_file(manifest, manifest.version)
        if checksum not in self._tokenizers:
            data = context.exchange.durable.get(manifest.files["tokenizer.json"])
            try:
                self._tokenizers[checksum] = Tokenizer.from_str(data.decode())
            except Exception as error:  # tokenizers raises plain Exception
                where = f"tokenizer.json of {label(manifest.version)}"
                raise FatalError(f"{where} is no tokenizer: {' '.join(str(error).split())}") from error
        return self._tokenizers[checksum]


def _tokenizer_file(manifest: Manifest, version: Version) -> str:
    if "tokenizer.json" not in manifest.files:
        raise FatalError(f"the model {label(version)} has no tokenizer.json; save it with a fast tokenizer")
    return manifest.files["tokenizer.json"].checksum


def _weighted(
    results: Sequence[Scored | Failed], weights: Mapping[str, float], items: Sequence[Item]
) -> list[Scored | Failed]:
    """With "score" as the weighted sum of the numbers that `weights` names; a sample that lacks one has failed."""
    if not weights:
        return list(results)
    found: list[Scored | Failed] = []
    for result, item in zip(results, items, strict=True):
        if isinstance(result, Scored):
            if lacking := [name for name in weights if name not in result.numbers]:
                known = ", ".join(result.numbers)
                result = Failed(f"reward.weights names {lacking[0]!r}, the scorer gave {known} for {item.name}")
            else:
                total = sum(weight * result.numbers[name] for name, weight in weights.items())
                result = Scored({**result.numbers, "score": float(total)}, result.pred)
        found.append(result)
    return found


def _same_columns(results: Sequence[Scored | Failed], items: Sequence[Item]) -> list[Scored | Failed]:
    """Every sample has the numbers that the first one has, or it is a failure that says which it lacks."""
    names = next((set(r.numbers) for r in results if isinstance(r, Scored)), set())
    checked: list[Scored | Failed] = []
    for result, item in zip(results, items, strict=True):
        if isinstance(result, Scored) and set(result.numbers) != names:
            odd = sorted(set(result.numbers) ^ names)
            result = Failed(f"the scorer gave {odd} for some samples and not for others, first at {item.name}")
        checked.append(result)
    return checked


def _columns(results: Sequence[Scored | Failed]) -> dict[str, Any]:
    numbers = [result.numbers for result in results if isinstance(result, Scored)]
    names = numbers[0] if numbers else ("score",)
    return {name: np.array([n[name] for n in numbers], np.float32) for name in names}


def _text(batch: SampleBatch, i: int, item: Item, result: Scored | Failed) -> bytes:
    said: dict[str, Any] = (
        {"score": None, "error": result.message}
        if isinstance(result, Failed)
        else {**result.numbers, **({} if result.pred is None else {"pred": result.pred})}
    )
    line = {
        "group": item.group,
        "index": item.index,
        "prompt": item.prompt,
        "response": item.response,
        **said,
        "finish": Finish(int(batch.finish[i])).name.lower(),
        "version": int(batch.version[i]),
        "tokens": int(batch.responses.lengths[i]),
    }
    truth = next(ground_truths(item.row), None)
    if truth is not None:
        line["ground_truth"] = truth
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"
