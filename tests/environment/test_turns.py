"""What chat templates write between turns: as whole conversations have it, and what is found out beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from functions.base.chat import Chat
from functions.base.turns import Turns, check_tools

QWEN = """{%- if tools %}{{- '<|im_start|>system' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + CONTENT + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
FORGETS = QWEN.replace("CONTENT", "(message.content if loop.last else message.content.split('</think>\\n\\n')[-1])")
PLAIN = QWEN.replace("CONTENT", "message.content")
NEEDS_CALLS = """{%- for message in messages %}{%- if message.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call to answer') }}{% endif %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{- message.content + '<|im_end|>' }}
{%- else %}{{- '[INST]' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}"""
NO_TOOLS = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"


def chat(template: str) -> Chat:
    """Every character is a token, and so are the special ones."""
    characters = [chr(c) for c in range(128)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return Chat(tokenizer, {}, template, Path("model"))


def written(template: str, role: str, *observations: tuple[str, str]) -> str:
    turns = Turns(chat(template), ["<|im_end|>"], role)
    ids = turns.between([turns.message(text, name) for name, text in observations])
    return "".join(str(turns.chat.tokenizer.id_to_token(i)) for i in ids)


def test_increments() -> None:
    assert written(PLAIN, "user", ("", "go on")) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert written(PLAIN, "tool", ("a", "1"), ("b", "<2>")) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n<2>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert written(NEEDS_CALLS, "tool", ("a", "1")) == "[TOOL_RESULTS]1[/TOOL_RESULTS]"


@pytest.mark.parametrize("role", ["tool", "user"])
def test_they_are_what_the_whole_conversation_has(role: str) -> None:
    """Rendered as a whole, a conversation is what was sampled and what was given, one after the other."""
    of = chat(PLAIN)
    turns = Turns(of, ["<|im_end|>"], role)
    asked = [{"role": "user", "content": "7*8=?"}]
    said, told = ["let me see", "", "it is 56"], ["56", "yes <|im_start|>", "fine"]
    ids, messages = of.encode(asked), list(asked)
    for text, answer in zip(said, told, strict=True):
        ids += [*of.encode_rendered(text + "<|im_end|>"), *turns.between([turns.message(answer)])]
        messages += [{"role": "assistant", "content": text}, dict(turns.message(answer))]
    assert ids == of.encode(messages)


@pytest.mark.parametrize(
    ("template", "role", "line"),
    [
        (FORGETS, "user", "writes an assistant's turn otherwise once a message of role 'user' follows it"),
        (NO_TOOLS, "tool", "does not write messages of role 'tool'"),
        (
            PLAIN.replace("CONTENT", "x").replace("+ '<|im_end|>\\n' }}\n{%- else", "}}\n{%- else"),
            "user",
            "does not end an",
        ),
        ("{{ raise_exception('no') }}", "user", "the chat template refuses the messages: no"),
    ],
)
def test_templates_that_cannot_have_turns(template: str, role: str, line: str) -> None:
    with pytest.raises(ValueError) as error:
        Turns(chat(template), ["<|im_end|>"], role)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_that_forgets_thoughts_may_have_tools() -> None:
    """Where it forgets them only before what a user says next (Qwen3), tools' answers change nothing."""
    kept = FORGETS.replace("if loop.last else", "if loop.last or messages[-1].role == 'tool' else")
    assert written(kept, "tool", ("a", "1")).startswith("\n<|im_start|>user\n<tool_response>")


def test_tools_are_named() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    check_tools(chat(PLAIN), tools)
    with pytest.raises(ValueError, match=r"does not name the environment's tools \(add\)"):
        check_tools(chat(NO_TOOLS), tools)
