"""Unmodified clients as harnesses: what they ask and get is the episode, token for token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.call.function import FatalError
from functions.environment.function import EnvironmentFunction
from tests.environment.test_function import STOP, Scene

TOOL = '{"type": "function", "function": {"name": "price", "description": "", "parameters": {"type": "object"}}}'
CHAT = f'''
import json
from openai import OpenAI
TOOL = json.loads("""{TOOL}""")
class Agent:
    def reset(self, row):
        self.row, self.answers = row, []
    def run(self, base_url):
        client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
        messages = [{{"role": "user", "content": self.row["question"]}}]
        while len(self.answers) < self.row.get("turns", 2):
            stream = self.row.get("stream", False)
            said = client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL], temperature=0.1, stream=stream, logprobs=True)
            if stream:
                chunks = list(said)
                message = {{"role": "assistant", "content": "".join(c.choices[0].delta.content or "" for c in chunks)}}
                calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
                logprobs = chunks[0].choices[0].logprobs.content
            else:
                choice = said.choices[0]
                message, calls = choice.message.model_dump(exclude_none=True), choice.message.tool_calls
                logprobs = choice.logprobs.content
            self.answers.append([message["content"], len(calls or ()), [x.logprob for x in logprobs]])
            message["tool_calls"] = [c.model_dump() for c in calls or ()]
            messages.append(message)
            messages += [{{"role": "tool", "tool_call_id": c.id, "content": "9"}} for c in calls or ()]
            if self.row.get("forks"):
                messages[0]["content"] = "other"
            if not calls:
                messages.append({{"role": "user", "content": "more"}})
    def get_reward(self, text):
        return len(text) / 8
'''
CALL = '<tool_call>{"name": "price", "arguments": {}}</tool_call>'


def agent(tmp_path: Path, code: str = CHAT) -> Scene:
    return Scene(tmp_path, code, "Agent")


def opened(scene: Scene, row: Mapping[str, Any], samples: int = 1, **params: Any) -> SampleBatch:
    """After the first request."""
    begun = SampleBatch.of_prompts([scene.ids("?")], samples_per_prompt=samples, version=0)
    on, over, _ = scene.answered(scene.act(begun, row, **params))
    assert over is None
    return on


@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_over_openais_client(tmp_path: Path, stream: bool) -> None:
    scene = agent(tmp_path)
    row = {"question": "tea?", "stream": stream}
    on = opened(scene, row)
    assert scene.tokenizer.decode(on.prompts[0].tolist()) == "pricetea?=", "it makes the prompt"
    assert not len(on.responses.flat)
    first = scene.said(on, [CALL])
    on, _, _ = scene.answered(scene.act(first, row))
    assert on.responses[0][: len(first.responses[0])].tolist() == first.responses[0].tolist()
    assert scene.text(on, 0) == CALL + "|9="
    mask = Ragged(on.mask, on.responses.lengths)[0]
    assert mask.tolist() == [1.0] * len(first.responses[0]) + [0.0] * 2
    last = scene.said(on, ["it is 9"])
    nothing, over, data = scene.answered(scene.act(last, row))
    assert nothing is None
    assert over.finish.tolist() == [Finish.STOP]
    assert over.responses.flat.tolist() == last.responses.flat.tolist()
    assert Columns.align(over, data["columns"]).sample["score"].tolist() == [7 / 8]
    assert (data["turns"], data["failed"]) == ([2], [])
    [line] = data["texts"]
    assert [m["role"] for m in line["conversation"]] == ["assistant", "tool", "assistant"]


def test_another_replica_begins_it_again(tmp_path: Path) -> None:
    """Whatever was recorded before the kill; what is not asked again as it was is one line."""
    scene, row = agent(tmp_path), {"question": "tea?"}
    on = opened(scene, row, 2)
    first = scene.said(on, [CALL, "5"])
    wanted, _, _ = scene.answered(scene.act(first, row))
    for lost in ("/t01.", "/t0"):
        for key in list(scene.exchange.list("calls/s1.episodes/gen/")):
            if lost in key:
                scene.exchange.delete(key)
        scene.function = EnvironmentFunction()
        again, _, _ = scene.answered(scene.act(first, row))
        assert again.encode() == wanted.encode()
    scene.function = EnvironmentFunction()
    opened(scene, row, 2)
    for key in list(scene.exchange.list("calls/s1.episodes/gen/")):
        if "/t01." in key:
            scene.exchange.delete(key)
    scene.function = EnvironmentFunction()
    with pytest.raises(FatalError, match="otherwise when it is asked again"):
        scene.act(first, row | {"question": "bun?"})


def test_where_no_turn_or_no_room_is_left(tmp_path: Path) -> None:
    scene, row = agent(tmp_path), {"question": "tea?", "turns": 3}
    on = opened(scene, row)
    cases: list[tuple[dict[str, Any], dict[str, Any], Finish]] = [
        ({"max_turns": 1}, {}, Finish.TURNS),
        ({"max_response_length": 4}, {}, Finish.LENGTH),
        ({}, {"finish": Finish.LENGTH}, Finish.LENGTH),
    ]
    for params, said, finish in cases:
        scene.function = EnvironmentFunction()
        place = f"calls/s1.episodes/{len(params)}{finish}{len(said)}/"
        _, over, data = scene.answered(scene.act(scene.said(on, ["5"], **said), row, episodes=place, **params))
        assert over.finish.tolist() == [finish]
        assert Columns.align(over, data["columns"]).sample["score"].tolist() == [0.0], "it asked on, and raised"
    enough = {"question": "tea?", "turns": 1}
    scene.function = EnvironmentFunction()
    cut = scene.said(on, ["5"], finish=Finish.LENGTH)
    _, over, data = scene.answered(scene.act(cut, enough, episodes="calls/s1.episodes/enough/"))
    assert Columns.align(over, data["columns"]).sample["score"].tolist() == [1 / 8], "it was content with what it got"


@pytest.mark.parametrize(
    ("code", "row", "line"),
    [
        (CHAT, {"forks": True}, r"messages\[0\] is not what the episode has there"),
        ("class Agent:\n def reset(self): ...\n def run(self, base_url): ...", {}, "has returned without a request"),
        (CHAT, {"question": "x" * 99}, r"its first request has no room: data\.max_prompt_length"),
    ],
)
def test_what_is_no_episode(tmp_path: Path, code: str, row: Mapping[str, Any], line: str) -> None:
    scene, row = agent(tmp_path, code), {"question": "?", **row}
    with pytest.raises(FatalError, match=line):
        scene.act(scene.said(opened(scene, row, max_prompt_length=50), ["5"]), row, max_prompt_length=50)


TOKENS = """
import httpx
class Agent:
    def reset(self, row): ...
    def run(self, base_url):
        url, ids = base_url.removesuffix("/v1") + "/inference/v1/generate", [5, 6, 7]
        for more in ([8, 9], [4]):
            body = {"token_ids": ids, "model": "m", "sampling_params": {"logprobs": 1, "stop_token_ids": [0]}}
            [choice] = httpx.post(url, json=body, timeout=60).raise_for_status().json()["choices"]
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            ids += choice["token_ids"] + more
        self.ids = ids
        refused = httpx.post(url, json={"token_ids": ids[1:]})
        assert refused.status_code == 400, refused.text
    def get_reward(self):
        return len(self.ids)
"""
MESSAGES = """
import anthropic
class Agent:
    def reset(self, row): ...
    def run(self, base_url):
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
        tools = [{"name": "price", "input_schema": {"type": "object"}}]
        asked = {"model": "m", "max_tokens": 9, "system": "s", "tools": tools}
        messages = [{"role": "user", "content": "tea?"}]
        first = client.messages.create(messages=messages, **asked)
        assert (first.stop_reason, first.content[-1].name) == ("tool_use", "price"), first
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "9"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=messages, **asked) as told:
            self.said = "".join(told.text_stream)
    def get_reward(self):
        return len(self.said)
"""


def test_token_ids_as_verifiers_train_client_sends_them(tmp_path: Path) -> None:
    scene = agent(tmp_path, TOKENS)
    on = opened(scene, {})
    assert on.prompts[0].tolist() == [5, 6, 7]
    on, _, _ = scene.answered(scene.act(scene.said(on, ["ab"])))
    assert on.responses[0].tolist() == [*scene.ids("ab"), STOP, 8, 9]
    _, over, data = scene.answered(scene.act(scene.said(on, ["c"])))
    assert Columns.align(over, data["columns"]).sample["score"].tolist() == [3 + 5 + 3]


def test_anthropics_client(tmp_path: Path) -> None:
    pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    scene = agent(tmp_path, MESSAGES)
    on, _, _ = scene.answered(scene.act(scene.said(opened(scene, {}), [CALL])))
    assert scene.text(on, 0) == CALL + "|9="
    _, over, data = scene.answered(scene.act(scene.said(on, ["fine"])))
    assert Columns.align(over, data["columns"]).sample["score"].tolist() == [4]
    assert np.all(over.mask[: len(CALL) + 1] == 1)
    assert json.dumps(data["failed"]) == "[]"
