"""Prompts to tokens: the same ids as transformers gives, on tokenizers and templates of many makes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from functions.base.chat import Chat

CORPUS = "the quick brown fox jumps over the lazy dog user assistant system you are helpful hello world 0 1 2 3"
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}\n"
    "{% for message in messages %}\n"
    "  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
    "    {{ raise_exception('Conversation roles must alternate') }}\n"
    "  {% endif %}\n"
    "  {% if message['role'] == 'user' %}\n"
    "    {{ bos_token + '[INST] ' + system + message['content'] | trim + ' [/INST]' }}\n"
    "  {% else %}\n    {{ ' ' + message['content'] + ' ' + eos_token }}\n  {% endif %}\n"
    "{% endfor %}\n"
)
TRICKY = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{{ {'a': '<é>', 'b': [1, none]} | tojson }}"
    "{{ m | tojson(indent=2) }}{{ pad_token }}|{{ undefined_thing }}|{% if tools %}tools{% endif %}"
    "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y')|length }}"
)
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello world"}],
    [{"role": "system", "content": "you are helpful"}, {"role": "user", "content": " the quick\n\nbrown fox  "}],
    [
        {"role": "user", "content": "hello <|im_end|> é 你好"},
        {"role": "assistant", "content": "world"},
        {"role": "user", "content": "jumps <s> over"},
    ],
]
TEXTS = ["hello world", "", "  the <s> quick</s> brown", "hello <|im_start|>user\n", "é 你好 unknown words"]


def byte_level() -> Tokenizer:
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet | {"he": 256}, merges=[("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def words() -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", "<pad>", *dict.fromkeys(CORPUS.split())]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    return tokenizer


def qwen(directory: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config(directory, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None, chat_template=CHATML)


def llama_with_bos(directory: Path) -> None:
    tokenizer = words()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config(directory, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    (directory / "chat_template.jinja").write_text(LLAMA2)


def bos_wished_for_by_config(directory: Path) -> None:
    words().save(str(directory / "tokenizer.json"))
    config(
        directory, bos_token="<s>", eos_token="</s>", pad_token="<pad>", add_bos_token=True, add_eos_token=True,
        chat_template=[{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": TRICKY}],
    )  # fmt: skip


def bos_switched_off_by_config(directory: Path) -> None:
    tokenizer = words()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config(directory, bos_token="<s>", eos_token="</s>", pad_token="<pad>", add_bos_token=False, chat_template=TRICKY)


def tokens_only_in_config(directory: Path) -> None:
    """Special tokens that tokenizer.json lacks: transformers adds them, so they take ids and are not split."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("hello", special=False, normalized=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    added = {
        "content": "<|im_end|>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False,
        "special": True,
    }  # fmt: skip
    config(
        directory, added_tokens_decoder={"258": added}, eos_token="<|im_end|>", pad_token="<pad>", bos_token="<s>",
        additional_special_tokens=["<|im_start|>"], chat_template=CHATML,
    )  # fmt: skip


def truncating_and_padding(directory: Path) -> None:
    tokenizer = words()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20, pad_id=3, pad_token="<pad>")
    tokenizer.save(str(directory / "tokenizer.json"))
    config(directory, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=LLAMA2)


def example(directory: Path) -> None:
    root = Path(__file__).parents[2] / "examples/arithmetic"
    code = f"import sys, pathlib; sys.path.insert(0, {str(root)!r}); import prepare; "
    code += f"prepare.write_tokenizer(pathlib.Path({str(directory)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def config(directory: Path, **entries: Any) -> None:
    value = {"tokenizer_class": "PreTrainedTokenizerFast", **entries}
    (directory / "tokenizer_config.json").write_text(json.dumps(value))


MAKES = [
    qwen, llama_with_bos, bos_wished_for_by_config, bos_switched_off_by_config, tokens_only_in_config,
    truncating_and_padding, example,
]  # fmt: skip


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_same_ids_as_transformers(tmp_path: Path, make: Callable[[Path], None]) -> None:
    from transformers import AutoTokenizer

    make(tmp_path)
    ours, theirs = Chat.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert dict(ours.special) == theirs.special_tokens_map
    for messages in CONVERSATIONS:
        assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        wanted: Any = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode(messages) == wanted
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_messages_the_template_refuses(tmp_path: Path) -> None:
    llama_with_bos(tmp_path)
    with pytest.raises(ValueError, match=r"chat template refuses the messages: Conversation roles must alternate"):
        Chat.load(tmp_path).encode([{"role": "assistant", "content": "hello"}])


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    qwen(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match=r"refuses the messages: access to attribute '__class__' .* is unsafe"):
        Chat.load(tmp_path).encode([{"role": "user", "content": "hello"}])


def test_directories_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json; save the tokenizer"):
        Chat.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer: "):
        Chat.load(tmp_path)
    words().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"the prompt is a list of messages, but .* has no chat template"):
        Chat.load(tmp_path).encode([{"role": "user", "content": "hello"}])
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with pytest.raises(ValueError, match=r"chat template, line 2: "):
        Chat.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: want a JSON object, got list"):
        Chat.load(tmp_path)


def test_no_torch_and_no_transformers() -> None:
    code = "import sys, functions.base.chat; print(sorted({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
