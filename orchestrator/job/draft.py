"""A job file from a model and a data set: what can be found out of them is found out, the rest is said in comments."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from functions.base.rows import ground_truths
from orchestrator.base.errors import ConfigError, DataError
from orchestrator.job import hub_data
from orchestrator.job.data import Row, read_rows
from orchestrator.job.hub import MODEL_FILES, HubId, snapshot
from orchestrator.job.prompts import load_chat

PROMPT_KEYS = ("prompt", "input", "question", "problem", "query", "instruction", "text")
"""Columns that a prompt is looked for in; the first two need no saying."""
LRS = {"sft": "2e-5", "reward_model": "1e-4"}
"""TRL's."""
LONGEST_RESPONSE = 512
MOST_PROMPTS, MOST_HELD_OUT = 64, 0.05
NUMBER = re.compile(r"\$?[+-]?[\d.,]+(/\d+)?%?")


@dataclass(frozen=True)
class Draft:
    text: str
    own_reward: bool
    """The job names reward.py:compute_score, as no rule fits."""


def draft(name: str, recipe: str, model: str, data: str, beside: Path, *, given: bool = False) -> Draft:
    """A job file that lies in `beside`; `model` and `data` as the user has them: paths from here, or ids of the Hub.
    `given`: the recipe trains on responses of the data.

    Raises ConfigError or DataError, one line.
    """
    directory, model = _model(model, beside)
    (paths, data), held_out = _data(data, beside)
    chat = load_chat(directory)
    key, rows = _rows(paths)
    config = _config(directory / "config.json")
    text_config = config.get("text_config", config)
    template = chat.has_template and isinstance(rows[0].prompt, str)

    def length(row: Row) -> int:
        prompt = row.prompt
        told = template and isinstance(prompt, str)
        try:
            return len(chat.encode([{"role": "user", "content": prompt}] if told else prompt))
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from error

    others = [] if held_out is None else read_rows(*held_out[0], prompt_key=None if key in PROMPT_KEYS[:2] else key)
    longest = max(map(length, [*rows, *others]))
    truths = [str(truth) for row in rows if (truth := next(ground_truths(row.columns), None)) is not None]
    score, why = _score(rows, truths)
    answer = max((len(chat.encode(truth)) for truth in truths), default=0)
    room = text_config.get("max_position_embeddings")
    response = max(LONGEST_RESPONSE, 2 * answer)
    enough = f"  # the longest right answer has {answer} tokens" if answer else ""
    if isinstance(room, int) and room - longest < response:
        response, enough = max(1, room - longest), f"  # what the model's {room} positions leave"
    answers, of = recipe != "reward_model", "  # of the validation's responses" if given else ""
    per_step = min(MOST_PROMPTS, 1 << max(0, (len(rows) // 4).bit_length() - 1))
    dtype = "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32"
    lines = [
        f"# {len(rows)} prompts, the longest of {longest} tokens; written by `rlhf-orchestrate init`.",
        f"name = {_quoted(name)}",
        f"recipe = {_quoted(recipe)}  # `rlhf-orchestrate recipes` lists them",
        f"steps = {max(1, len(rows) // per_step)}  # once through the data",
        "",
        "[model]",
        f"path = {_quoted(model)}",
        f'dtype = "{dtype}"  # as the weights are',
        "# lora_rank = 16  # trains adapters alone: less memory; then lr = 1e-5 or more",
        "",
        "[data]",
        f"train = {_quoted(data)}",
        *(_validation(None if held_out is None else held_out[1], len(rows)) if answers else []),
        f"prompts_per_step = {per_step}",
        f"max_prompt_length = {longest}  # tokens of the longest prompt",
        *([] if key in PROMPT_KEYS[:2] else [f"prompt_key = {_quoted(key)}"]),
        *(["apply_chat_template = true  # prompts are text, the model was made to chat"] if template else []),
        "",
        "[rollout]",
        *([] if given else ["n = 8  # responses to each prompt"]),
        f"max_response_length = {response}{enough}",
        *(["", f"[reward]{of}", f"score = {_quoted(score)}  # {why}"] if answers else []),
        "",
        "[train]" if answers else "[critic]",
        f"lr = {LRS.get(recipe, '1e-6')}",
        "",
        f"[functions.{('train' if given else 'generate') if answers else 'critic'}]",
        "replicas = 1  # at most so many at a time",
        "# gpus = 1  # of one replica" + ("" if given else ", with rollout.engine = \"vllm\""),
        "# usd_per_hour = 2.5  # of one replica while it exists: `cost` then says dollars",
    ]  # fmt: skip
    return Draft("\n".join(lines) + "\n", answers and score.endswith(":compute_score"))


def _model(model: str, beside: Path) -> tuple[Path, str]:
    id = None if Path(model).exists() else HubId.parse(model)
    if id is None:
        path = Path(model)
        if not (path / "config.json").is_file():
            raise ConfigError(f"{model}: no config.json; wants a Hugging Face model directory, or an id of the Hub")
        return path, _relative(path, beside)
    try:
        return snapshot(id, "model", MODEL_FILES), model
    except ValueError as error:
        raise ConfigError(str(error)) from error


Named = tuple[Sequence[Path], str]
"""Files, and how the job names them."""


def _data(data: str, beside: Path) -> tuple[Named, Named | None]:
    """What to train on, and what to validate on (None: there is nothing)."""
    path = Path(data)
    id = None if path.exists() else HubId.parse(data)
    if id is None:
        others = (path.with_name(path.name.replace("train", other)) for other in ("validation", "val", "dev", "test"))
        found = next((other for other in others if other != path and other.is_file()), None)
        return ([path], _relative(path, beside)), None if found is None else ([found], _relative(found, beside))
    try:
        train = (hub_data.find(id, "train").paths, data)
    except ValueError as error:
        raise DataError(str(error)) from error
    try:
        held_out = hub_data.find(HubId(id.repository, id.config, None, id.revision), "validation")
    except ValueError:  # it has none, or one that is not here
        return train, None
    return train, (held_out.paths, str(HubId(id.repository, id.config, held_out.id.split, id.revision)))


def _config(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return found


def _rows(paths: Sequence[Path]) -> tuple[str, list[Row]]:
    """The column of the prompts, and the rows."""
    try:
        return "prompt", read_rows(*paths)
    except DataError as error:
        for key in PROMPT_KEYS[2:]:
            try:
                return key, read_rows(*paths, prompt_key=key)
            except DataError:
                continue
        raise error from None


def _score(rows: Sequence[Row], truths: Sequence[str]) -> tuple[str, str]:
    """`reward.score`, and why."""
    source = rows[0].data_source.lower()
    if len(truths) < len(rows):
        return "reward.py:compute_score", "rows without a right answer: score responses there"
    if "gsm8k" in source or all("####" in truth for truth in truths):
        return (
            "rule:number",
            "right answers end in #### NUMBER: the response's last one counts (rule:gsm8k: after ####)",
        )
    if "math" in source or all("\\boxed" in truth for truth in truths):
        return "rule:boxed", "what the last \\boxed{} holds"
    if all(NUMBER.fullmatch(truth.strip()) for truth in truths):
        return "rule:number", "right answers are numbers: the response's last one counts"
    return "rule:exact", "the whole response is the right answer, or it is not; or reward.py:compute_score"


def _validation(name: str | None, rows: int) -> list[str]:
    if name is not None:
        return [f"validation = {_quoted(name)}"]
    if rows * MOST_HELD_OUT < 1:
        return ['# validation = "validation.jsonl"  # too few rows to hold some of them out']
    return [f"validation_fraction = {MOST_HELD_OUT}  # held out of train: there is no file to validate on"]


def _relative(path: Path, beside: Path) -> str:
    """As a job file in `beside` names it."""
    whole = path.resolve()
    near = whole.is_relative_to(beside.resolve())
    return os.path.relpath(whole, beside.resolve()) if near else str(whole)


def _quoted(text: Any) -> str:
    return json.dumps(text, ensure_ascii=False)
