"""Prompts as the loop draws them: rows of the data sets, as tokens, in the order of the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from functions.base.chat import Chat
from functions.base.wire import Json
from orchestrator.base.errors import ConfigError, DataError
from orchestrator.job.config import JobConfig
from orchestrator.job.data import Cursor, Row, Tokenized, digest, next_batch, read_rows, split, tokenize
from orchestrator.job.environment import environment_tools, tools_of
from orchestrator.job.located import data_files

NOTHING = Tokenized([], [], [])


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one generation: token ids, and the data set's rows for the scorer. `first_group` numbers them."""

    tokens: Sequence[Sequence[int]]
    rows: Sequence[Json]
    first_group: int = 0

    @property
    def groups(self) -> range:
        return range(self.first_group, self.first_group + len(self.tokens))


@dataclass(frozen=True)
class PromptSource:
    """A job's training and validation prompts."""

    train: Tokenized
    held_out: Tokenized
    shuffle: bool

    @classmethod
    def load(cls, job: JobConfig) -> PromptSource:
        """Reads the job's data with the tokenizer of its model. Raises ConfigError, DataError: one line each."""
        try:
            chat = Chat.load(Path(job.model.path), job.data.chat_template_kwargs)
        except ValueError as error:
            raise ConfigError(f"model.path: {error}") from error
        if job.data.apply_chat_template and not chat.has_template:
            raise ConfigError(f"data.apply_chat_template: {job.model.path} has no chat template; leave it out")
        key = job.data.prompt_key
        train: Sequence[Row] = read_rows(*data_files(job.data.train, "train"), prompt_key=key)
        held_out: Sequence[Row] = []
        if job.data.validation is not None:
            held_out = read_rows(*data_files(job.data.validation, "validation"), prompt_key=key)
        elif job.data.validation_fraction:
            train, held_out = split(train, job.data.validation_fraction, job.seed)

        tools = {} if job.environment is None else environment_tools(job, chat)

        def encode(row: Row) -> Sequence[int]:
            prompt = row.prompt
            if isinstance(prompt, str) and (job.data.apply_chat_template or tools):
                prompt = [{"role": "user", "content": prompt}]
            return chat.encode(prompt, tools_of(row, tools) if tools else None)

        def encoded(rows: Sequence[Row]) -> Tokenized:
            return tokenize(rows, encode, max_prompt_length=job.data.max_prompt_length, over_long=job.data.over_long)

        return cls(encoded(train), encoded(held_out) if held_out else NOTHING, job.data.shuffle)

    @property
    def summary(self) -> str:
        text = f"{len(self.train.rows)} prompts to train on, {len(self.held_out.rows)} held out"
        return "; ".join([text, *self.dropped])

    @property
    def dropped(self) -> list[str]:
        """A line for each of the two that has lost prompts: how many, and which."""
        parts = {"train": self.train, "validation": self.held_out}
        return [f"data.{name}: {part.describe_dropped()}; dropped" for name, part in parts.items() if part.dropped]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, validation included."""
        return max((len(tokens) for tokens in (*self.train.tokens, *self.held_out.tokens)), default=0)

    @cached_property
    def digest(self) -> str:
        """What the job is trained on; part of its history."""
        return digest(self.train.rows)

    def check_unchanged(self, history: Json) -> None:
        """Raises DataError where the job was started on other rows."""
        if history["data"] != self.digest:
            raise DataError("data.train has changed since the job began; restore it, or start another run")

    def draw(self, cursor: Cursor, size: int, *, first_group: int) -> tuple[PromptSet, Cursor]:
        drawn, cursor = next_batch(cursor, len(self.train.rows), size, shuffle=self.shuffle)
        return _prompts(self.train, drawn, first_group), cursor

    def validation(self) -> PromptSet:
        return _prompts(self.held_out, range(len(self.held_out.rows)), 0)


def _prompts(data: Tokenized, at: Sequence[int], first_group: int) -> PromptSet:
    return PromptSet([data.tokens[i] for i in at], [data.rows[i].to_json() for i in at], first_group)


@dataclass
class Draw:
    """A step's draws from the data: the first one is its batch, later ones are numbered on from it."""

    source: PromptSource
    cursor: Cursor
    size: int
    drawn: int = 0

    def next(self) -> PromptSet:
        prompts, self.cursor = self.source.draw(self.cursor, self.size, first_group=self.drawn)
        self.drawn += len(prompts.tokens)
        return prompts
