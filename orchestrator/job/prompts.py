"""Prompts as the loop draws them: rows of the data sets, as tokens, in the order of the cursor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

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
    chat: Chat | None = field(default=None, compare=False)
    """The tokenizer, for responses that the rows give."""
    asked: int = 0
    """As PromptSource's: what is here instead is what the data says."""

    def given(self, columns: Sequence[str]) -> list[list[list[int]]]:
        """Tokens of each prompt's responses in `columns`, each with the end of sequence. Raises DataError."""
        assert self.chat is not None, "of a source"
        return [[completion(self.chat, row, name) for name in columns] for row in self.rows]

    @property
    def groups(self) -> range:
        return range(self.first_group, self.first_group + len(self.tokens))


@dataclass(frozen=True)
class PromptSource:
    """A job's training and validation prompts."""

    train: Tokenized
    held_out: Tokenized
    shuffle: bool
    chat: Chat | None = None
    asked: int = 0
    """Tokens of the longest prompt that an environment may make itself; 0: none does."""

    @classmethod
    def load(cls, job: JobConfig) -> PromptSource:
        """Reads the job's data with the tokenizer of its model. Raises ConfigError, DataError: one line each."""
        chat = load_chat(Path(job.model.path), job.data.chat_template_kwargs, key="model.path: ")
        if job.data.apply_chat_template and not chat.has_template:
            raise ConfigError(f"data.apply_chat_template: {job.model.path} has no chat template; leave it out")
        key = job.data.prompt_key
        train: Sequence[Row] = read_rows(*data_files(job.data.train, "train"), prompt_key=key)
        held_out: Sequence[Row] = []
        if job.data.validation is not None:
            held_out = read_rows(*data_files(job.data.validation, "validation"), prompt_key=key)
        elif job.data.validation_fraction:
            train, held_out = split(train, job.data.validation_fraction, job.seed)

        tools, asks = ({}, False) if job.environment is None else environment_tools(job, chat)

        def encode(row: Row) -> Sequence[int]:
            prompt = row.prompt
            if isinstance(prompt, str) and (job.data.apply_chat_template or tools):
                prompt = [{"role": "user", "content": prompt}]
            return chat.encode(prompt, tools_of(row, tools) if tools else None)

        def encoded(rows: Sequence[Row]) -> Tokenized:
            return tokenize(rows, encode, max_prompt_length=job.data.max_prompt_length, over_long=job.data.over_long)

        room = job.data.max_prompt_length if asks else 0
        return cls(encoded(train), encoded(held_out) if held_out else NOTHING, job.data.shuffle, chat, room)

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
        return max(self.asked, *(len(tokens) for tokens in (*self.train.tokens, *self.held_out.tokens)), 0)

    @cached_property
    def digest(self) -> str:
        """What the job is trained on; part of its history."""
        return digest(self.train.rows)

    def check_unchanged(self, history: Json) -> None:
        """Raises DataError where the job was started on other rows."""
        if history["data"] != self.digest:
            raise DataError("data.train has changed since the job began; restore it, or start another run")

    def check_given(self, columns: Sequence[str], longest: int) -> None:
        """Raises DataError for a row without a response in one of `columns`, or with one of more tokens than that."""
        for at in range(len(self.train.rows)) if columns else ():
            row = self.train.rows[at]
            assert self.chat is not None, "of load"
            for name in columns:
                count = len(completion(self.chat, row.to_json() | {"where": row.where}, name))
                if count > longest:
                    raise DataError(f"{row.where}: {name} has {count} tokens, rollout.max_response_length is {longest}")

    def draw(self, cursor: Cursor, size: int, *, first_group: int) -> tuple[PromptSet, Cursor]:
        drawn, cursor = next_batch(cursor, len(self.train.rows), size, shuffle=self.shuffle)
        return replace(_prompts(self.train, drawn, first_group), chat=self.chat, asked=self.asked), cursor

    def validation(self) -> PromptSet:
        return replace(_prompts(self.held_out, range(len(self.held_out.rows)), 0), asked=self.asked)


def load_chat(directory: Path, kwargs: Mapping[str, Any] | None = None, *, key: str = "") -> Chat:
    """A model's tokenizer and chat template. Raises ConfigError, beginning with `key`."""
    try:
        return Chat.load(directory, kwargs)
    except ValueError as error:
        raise ConfigError(f"{key}{error}") from error


def _prompts(data: Tokenized, at: Sequence[int], first_group: int) -> PromptSet:
    return PromptSet([data.tokens[i] for i in at], [data.rows[i].to_json() for i in at], first_group)


def completion(chat: Chat, row: Json, name: str) -> list[int]:
    """Tokens of a row's response, a text or the assistant's message, and the end of sequence. Raises DataError."""
    value = row.get(name)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    where = row.get("where", f"prompt {row['prompt_id']}")
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {value!r:.60}, wants a text, or one message of the assistant")
    end = chat.special.get("eos_token")
    number = None if end is None else chat.tokenizer.token_to_id(end)
    tokens = list(chat.tokenizer.encode(value, add_special_tokens=False).ids)
    return tokens if number is None or tokens[-1:] == [number] else [*tokens, number]


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
