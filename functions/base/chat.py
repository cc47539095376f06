"""Prompts to token ids as transformers does it, without transformers: `tokenizers` and the model's jinja template.

Text       tokenizer(text): with the special tokens that tokenizer.json's post-processor adds. transformers (5.19,
           `tokenization_utils_base.py`, `_from_pretrained`) heeds add_bos_token and add_eos_token of
           tokenizer_config.json only where there is no tokenizer.json, so they mean nothing here either
Messages   apply_chat_template(messages, add_generation_prompt=True): rendered in a sandbox
           (`utils/chat_template_utils.py`, `_cached_compile_jinja_template`), then encoded without adding special
           tokens: the template writes them

Left out: tokenizers without `tokenizer.json` (SentencePiece, tiktoken files), and classes of transformers that rebuild
a tokenizer other than its `tokenizer.json` says.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Chat:
    """A model directory's tokenizer and chat template. `special` has its special tokens by name, as templates do."""

    def __init__(
        self, tokenizer: Tokenizer, special: Mapping[str, str], template: str | None, where: Path,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.special = special
        self._render = None if template is None else compile_template(template, where)
        self._where, self._kwargs = where, dict(template_kwargs or {})

    @classmethod
    def load(cls, directory: Path, template_kwargs: Mapping[str, Any] | None = None) -> Self:
        """Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

        `template_kwargs` go to the template. Raises ValueError in one line for a directory without a readable
        `tokenizer.json` or with a broken template.
        """
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{directory}: has no tokenizer.json; save the tokenizer with transformers' save_pretrained"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{file}: not a tokenizer: {' '.join(str(error).split())}") from error
        config = _json(directory / "special_tokens_map.json") | _json(directory / "tokenizer_config.json")
        special = {name: _content(config[name]) for name in SPECIAL if config.get(name) is not None}
        _add_tokens(tokenizer, config, special)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, special, _template(directory, config), directory, template_kwargs)

    @property
    def has_template(self) -> bool:
        return self._render is not None

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Token ids of a text or of a conversation, in which the template names `tools` (JSON schemas, as OpenAI's).

        Raises ValueError in one line where the template refuses it."""
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt).ids)
        return self.encode_rendered(self.render(prompt, tools))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of what a template has written, special tokens included."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word, as it stands at the beginning and after a space."""
        found = dict[tuple[int, ...], None]()
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                found[tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)] = None
        return tuple(ids for ids in found if ids)

    def render(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] | None = None, *, go_on: bool = True
    ) -> str:
        """The conversation as text; `go_on`: ending where the assistant is to go on."""
        if self._render is None:
            raise ValueError(
                f"the prompt is a list of messages, but {self._where} has no chat template "
                "(chat_template.jinja, or chat_template in tokenizer_config.json)"
            )
        try:
            return self._render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=go_on,
                **{**self.special, **self._kwargs},
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from error


def compile_template(template: str, where: Path) -> Callable[..., str]:
    """Jinja as transformers sets it up: sandboxed, blocks trimmed, loop controls, `{% generation %}`, tojson as is."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{where}: chat template, line {error.lineno}: {error.message}") from error


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; an empty one where there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: want a JSON object, got {type(value).__name__}")
    return value


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: chat_template.jinja before the config's, which may be text or a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return None if template is None else str(template)


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _added(token: Any, *, special: bool | None = None) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), special=True, normalized=False)
    flags = {name: bool(token[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in token}
    return AddedToken(
        str(token["content"]), special=bool(token.get("special")) if special is None else special, **flags
    )


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that only the config names: they get the next ids, in the order of their ids there, named ones last."""
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder") or {}
    wanted = [_added(entries[key]) for key in sorted(entries, key=int)]
    wanted += [_added(config[name], special=True) for name in special]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    wanted += [_added(token, special=True) for token in (extra.values() if isinstance(extra, dict) else extra)]
    for token in wanted:
        if token.content not in present:
            present.add(token.content)
            tokenizer.add_tokens([token])
