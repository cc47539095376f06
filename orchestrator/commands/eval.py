"""A model, or the policy of a run, on one or several data sets: from zero, billed, no training.

It is a job of 0 steps: generate and reward functions, and a run directory that says what was asked, what it has cost
and (samples/000000.jsonl) what was answered. Of a run its reward, rollout and function settings are taken, unless
given. best@k is the expected best of k samples (pass@k where accuracies are 0 and 1), maj@n the answer that most give.
"""

import contextlib
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from functions.base.wire import Json
from orchestrator.base.errors import ConfigError
from orchestrator.base.files import write_atomically
from orchestrator.commands.arguments import RUNS, json_output, print_json, run_path
from orchestrator.commands.cost import books_of
from orchestrator.job.config import apply_override, parse_job
from orchestrator.job.data import read_rows
from orchestrator.job.hub import HubId
from orchestrator.job.located import data_files
from orchestrator.run.directory import RunDirectory, unique_name
from orchestrator.session.session import Run, prepare, train
from orchestrator.session.terminal_view import dollars, open_view

HELP = "a model or a run on data sets: pass@k, majority, any reward"
EXAMPLE = "rlhf-orchestrate eval runs/arithmetic --data examples/arithmetic/validation.jsonl -n 8 --json"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="run directory or name, a Hugging Face directory, or an id of the Hub")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings of the job, as in `run`")
    parser.add_argument("--data", action="append", required=True, help="data set with prompts; may be repeated")
    parser.add_argument("--reward", help="rule:NAME, file.py:function, model or a URL (default: the run's; rule:exact)")
    parser.add_argument("-n", type=int, default=1, help="samples per prompt (default: 1)")
    parser.add_argument("--temperature", type=float, help="default: 0 (greedy) for one sample, else 1")
    parser.add_argument("--run-dir", type=Path, help="where it is kept (default: runs/eval-...)")
    json_output(parser)


def execute(given: Namespace) -> int:
    job, path = _table(given), given.run_dir or RUNS / unique_name("eval")
    job["data"] |= _data(given.data, job["data"].get("prompt_key"), path)
    for override in given.overrides:
        apply_override(job, override)
    prepared = prepare(parse_job(job, base=Path.cwd(), where="eval"))
    directory = RunDirectory.create(path, prepared.named)
    with contextlib.redirect_stdout(sys.stderr):
        train(Run(prepared, directory), open_view(Console(stderr=True)))
    result = _result(directory, given.model)
    if given.json:
        print_json(result)
    else:
        _print(result)
    return 0


def _table(given: Namespace) -> dict[str, Any]:
    """The job as TOML would have it."""
    run, table = run_path(given.model), dict[str, Any]()
    if (run / "run.json").exists():
        kept = json.loads(RunDirectory.open(run).job.model_dump_json(exclude_defaults=True, exclude_none=True))
        table = {key: kept[key] for key in ("reward", "rollout", "platform", "limits") if key in kept}
        functions = {name: value for name, value in kept.get("functions", {}).items() if name in ("generate", "reward")}
        table |= {"functions": functions, "data": {key: value for key, value in kept["data"].items() if key in _HOW}}
    model = {"path": str(run.resolve()) if run.exists() else given.model}
    temperature = given.temperature if given.temperature is not None else 0.0 if given.n == 1 else 1.0
    table |= {
        "name": "eval", "steps": 0, "model": model, "telemetry": {"samples": 1_000_000, "tensorboard": False},
        "validation": {"n": given.n, "temperature": temperature}, "data": table.get("data", {}),
    }  # fmt: skip
    if given.reward is not None:
        table["reward"] = {"score": given.reward}
    return table


_HOW = ("prompt_key", "apply_chat_template", "chat_template_kwargs", "max_prompt_length", "over_long")
"""Of a run's data: how prompts are read, not which."""


def _data(names: list[str], prompt_key: str | None, path: Path) -> Json:
    """One data set as it is; several in one file beside the run, each row with the set that it is of."""
    if len(names) == 1:
        return {"train": names[0], "validation": names[0]}
    lines, sources = list[str](), dict[str, str]()
    for name in names:
        try:
            here = Path(name) if HubId.parse(name) is None or Path(name).exists() else name
            rows = read_rows(*data_files(str(here), "validation"), prompt_key=prompt_key)
        except ValueError as error:
            raise ConfigError(f"--data: {error}") from error
        for row in rows:
            source = str(row.columns.get("data_source") or Path(name).stem)
            if sources.setdefault(source, name) != name:
                raise ConfigError(
                    f"--data: {name} and {sources[source]} both have data_source {source!r}: one at a time"
                )
            lines.append(json.dumps({**row.columns, "data_source": source}, ensure_ascii=False))
    file = path.with_name(f"{path.name}.data.jsonl")
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode())
    return {"train": str(file.resolve()), "validation": str(file.resolve())}


def _result(directory: RunDirectory, model: str) -> Json:
    metrics = json.loads((directory.path / "metrics.jsonl").read_text().splitlines()[0])
    books = books_of(directory)
    seconds = sum(cost.replica_s for cost in books.functions.values())
    return {
        "model": model,
        "run": str(directory.path),
        "metrics": {name: value for name, value in metrics.items() if name.startswith("val-core/")},
        "replica_s": seconds,
        "usd": books.usd,
    }


def _print(result: Json) -> None:
    table = Table(box=SIMPLE)
    columns = list(dict.fromkeys(_parts(name)[1] for name in result["metrics"]))
    for name in ("data", *columns):
        table.add_column(name, justify="left" if name == "data" else "right")
    for source in dict.fromkeys(_parts(name)[0] for name in result["metrics"]):
        found = {_parts(name)[1]: value for name, value in result["metrics"].items() if _parts(name)[0] == source}
        table.add_row(source, *(f"{found[name]:.3f}" if name in found else "" for name in columns))
    console = Console()
    console.print(table)
    paid = dollars(result["usd"]) if result["usd"] else f"{result['replica_s']:.0f} replica-seconds"
    console.print(f"{paid}; what was answered: {result['run']}/samples/000000.jsonl", highlight=False)


def _parts(name: str) -> tuple[str, str]:
    """`val-core/gsm8k/acc/best@4/mean` to ("gsm8k", "best@4"), of rewards ("gsm8k", "reward")."""
    words = name.split("/")
    at = max(i for i, word in enumerate(words) if word in ("acc", "reward"))
    return "/".join(words[1:at]), words[at + 1] if words[at] == "acc" else "reward"
