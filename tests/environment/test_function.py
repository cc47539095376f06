"""The environment function in this process, on a directory: answers, records, what goes wrong."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Ref, Version
from functions.call.function import Context, FatalError, ReplicaBroken
from functions.environment.function import EnvironmentFunction
from functions.environment.told import pieces_of
from functions.exchange.directory import DirectoryExchange
from functions.weights.base import import_model
from tests.support.environment_job import TEMPLATE
from tests.support.waiting import until

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
NAMES = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
STOP = 0
"""<eos>"""
TOOLS = '''
class Shop:
    def reset(self, row):
        self.prices, self.asked = row["prices"], []
    def price(self, item: str, count: int = 1) -> int:
        """Of an item."""
        self.asked.append(item)
        return self.prices[item] * count
    def get_reward(self, text):
        return 1.0 if text == str(sum(self.prices[i] for i in self.asked)) else len(self.asked) / 8
'''
GAME = """
import random
class Game:
    made = []
    def __init__(self):
        Game.made.append(self)
    def reset(self, seed):
        self.dice, self.said = random.Random(seed), []
    def step(self, text):
        self.said.append(text)
        if text == "end":
            return None
        return f"{len(self.said)}.{self.dice.randint(100, 999)}", len(text) / 4
"""


class Scene:
    """A model directory, an exchange, one environment class; `act` makes one call of a new function (a new replica)."""

    def __init__(self, directory: Path, code: str, name: str) -> None:
        model = directory / "model"
        model.mkdir()
        words = ["<eos>", *CHARACTERS]
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(model / "tokenizer.json"))
        (model / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
        (model / "config.json").write_text('{"eos_token_id": 0, "model_type": "llama"}')
        (model / "chat_template.jinja").write_text(
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE
        )
        save_file({"w": np.zeros(2, np.float32)}, str(model / "model.safetensors"))
        self.tokenizer = tokenizer
        self.exchange = DirectoryExchange(f"{directory}/exchange")
        self.policy: Version = import_model(self.exchange, "policy", model)
        (directory / "environment.py").write_text(code)
        self.kind, self.calls, self.directory = f"{directory}/environment.py:{name}", 0, directory
        self.function = EnvironmentFunction()

    def ids(self, text: str) -> list[int]:
        return [CHARACTERS.index(c) + 1 for c in text]

    def first(self, texts: Sequence[str], *, finish: Finish = Finish.STOP) -> SampleBatch:
        """One group; each sample's first turn says one of the texts."""
        batch = SampleBatch.of_prompts([self.ids("?")], samples_per_prompt=len(texts), version=0)
        return self.said(batch, texts, finish=finish)

    def said(self, batch: SampleBatch, texts: Sequence[str], *, finish: Finish = Finish.STOP) -> SampleBatch:
        """The samples with another turn, as generate hands them over."""
        ends = [STOP] if finish == Finish.STOP else []
        new = [self.ids(text) + ends for text in texts]
        rows = [np.concatenate((row, own)) for row, own in zip(batch.responses.rows(), new, strict=True)]

        def more(flat: Any, value: float) -> Any:
            parts = Ragged(flat, batch.responses.lengths).rows()
            return np.concatenate(
                [np.append(p, np.full(len(o), value)) for p, o in zip(parts, new, strict=True)]
            ).astype(np.float32)

        return dataclasses.replace(
            batch, responses=Ragged.from_rows(rows, np.int32), logprobs=more(batch.logprobs, -0.5),
            mask=more(batch.mask, 1.0), finish=np.full(len(batch), finish, np.int32),
        )  # fmt: skip

    def act(
        self, batch: SampleBatch, row: Mapping[str, Any] | None = None, *, prior: Sequence[Event] = (),
        cut: threading.Event | None = None, **params: Any,
    ) -> list[Event]:  # fmt: skip
        self.calls += 1
        ref = self.exchange.put(f"batches/{self.calls}", batch.encode())
        rows = self.exchange.put(f"rows/{self.calls}", json.dumps({"0": {"x": 1, **(row or {})}}).encode())
        told = {"kinds": {"": self.kind}, "episodes": "calls/s1.episodes/gen/", "max_turns": 4,
                "max_response_length": 200, "score": True} | params  # fmt: skip
        call = Call(
            f"s1.environment.{self.calls}", "act", {"samples": [ref], "rows": [rows]}, {"policy": self.policy}, told
        )
        context = Context(self.exchange, str(self.directory), iter(prior), cut or threading.Event())
        return list(self.function.call(call, context))

    def answered(self, events: Sequence[Event]) -> tuple[SampleBatch, SampleBatch, dict[str, Any]]:
        """(going on, over, what is said of those that are over, in order); the two without samples are None."""
        parts: dict[bool, list[SampleBatch]] = {True: [], False: []}
        said: dict[tuple[int, int], dict[str, Any]] = {}
        data: dict[str, Any] = {"failed": [], "columns": [], "texts": []}
        for event in events:
            if event.kind != "samples":
                continue
            assert event.ref is not None
            on = event.data["finish"][0] == Finish.UNFINISHED
            parts[on].append(SampleBatch.decode(self.exchange.get(event.ref)))
            if on:
                continue
            for i, key in enumerate(parts[on][-1].keys):
                said[key] = {name: event.data[name][i] for name in ("turns", "tool_calls", "tool_errors")}
            data["failed"] += event.data["failed"]
            data["columns"].append(Columns.decode(self.exchange.get(Ref.from_json(event.data["columns"]))))
            data["texts"] += map(json.loads, self.exchange.get(Ref.from_json(event.data["texts"])).splitlines())
        for name in ("turns", "tool_calls", "tool_errors"):
            data[name] = [said[key][name] for key in sorted(said)]
        on_, over = (SampleBatch.concat(p).in_order() if p else None for p in (parts[True], parts[False]))
        return on_, over, data  # type: ignore[return-value]

    def text(self, batch: SampleBatch, i: int) -> str:
        return "".join("|" if t == STOP else CHARACTERS[t - 1] for t in batch.responses[i])


@pytest.fixture
def shop(tmp_path: Path) -> Scene:
    return Scene(tmp_path, TOOLS, "Shop")


@pytest.fixture
def game(tmp_path: Path) -> Scene:
    return Scene(tmp_path, GAME, "Game")


def call_of(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'price', 'arguments': arguments})}</tool_call>"


ROW = {"prices": {"tea": 3, "bun": 4}}


def test_an_episode(shop: Scene) -> None:
    """Tokens are appended, never others; what was given has mask 0; rewards are where they were earned."""
    first = shop.first([call_of(item="tea"), "7", call_of(item="tea") + call_of(item="bun", count=2)])
    on, over, data = shop.answered(shop.act(first, ROW))
    assert [shop.text(on, i)[len(shop.text(first, k)) :] for i, k in ((0, 0), (1, 2))] == ["3=", "38="]
    for i, k in ((0, 0), (1, 2)):
        begun = len(first.responses[k])
        assert on.responses[i][:begun].tolist() == first.responses[k].tolist()
        mask, logprobs = (Ragged(c, on.responses.lengths)[i] for c in (on.mask, on.logprobs))
        assert mask.tolist() == [1.0] * begun + [0.0] * (len(mask) - begun)
        assert logprobs[begun:].tolist() == [0.0] * (len(mask) - begun)
    assert (over.keys, over.finish.tolist()) == ([(0, 1)], [Finish.STOP])
    assert (data["turns"], data["tool_calls"], data["failed"]) == ([1], [0], [])
    second = shop.said(on, ["3", "11"])
    nothing, over, data = shop.answered(shop.act(second, ROW))
    assert nothing is None
    assert over.responses.flat.tolist() == second.responses.flat.tolist()
    assert (data["turns"], data["tool_calls"]) == ([2, 2], [1, 2])
    columns = Columns.align(over, data["columns"])
    assert columns.sample["score"].tolist() == [1.0, 2 / 8], "7 is what tea and bun cost, not 11"
    line = min(data["texts"], key=lambda line: line["index"])
    said = [(m["role"], m["content"]) for m in line["conversation"]]
    assert said == [("assistant", call_of(item="tea")), ("tool", "3"), ("assistant", "3")]
    for turn in line["conversation"][::2]:
        own = over.responses[0][turn["begin"] : turn["begin"] + turn["tokens"]]
        assert turn["pieces"] == [shop.tokenizer.decode([token], skip_special_tokens=False) for token in own]
        assert "".join(turn["pieces"]) == turn["content"] + "<eos>"


def test_what_each_token_adds_to_the_text() -> None:
    """No decoding of a token by itself: a letter may have several, and a word's space is the one's before it."""
    tokenizer = Tokenizer(models.BPE({"\u00c3": 0, "\u00a9": 1, "\u0120a": 2, "b": 3}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert pieces_of(tokenizer, [3, 0, 1, 2, 3]) == ["b", "", "\u00e9", " a", "b"]


@pytest.mark.parametrize(
    ("text", "kind", "answer"),
    [
        ("<tool_call>{price}</tool_call>", "not_json", "Error: the tool call is not JSON: "),
        ('<tool_call>["price"]</tool_call>', "not_json", "Error: a tool call is "),
        ('{"name": "sell", "parameters": {}}', "unknown_tool", "Error: there is no tool 'sell'; there are price"),
        (call_of(count=1), "wrong_arguments", "Error: argument 'item' is missing"),
        (call_of(item="tea", count="two"), "wrong_arguments", "Error: argument 'count' must be integer, got 'two'"),
        (call_of(item="tea", colour="red"), "wrong_arguments", "Error: no argument 'colour'; there are item, count"),
        (call_of(item="car"), "raised", "Error: KeyError: 'car'"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(shop: Scene, text: str, kind: str, answer: str) -> None:
    events = shop.act(shop.first([text]), ROW)
    on, over, _ = shop.answered(events)
    assert over is None
    assert shop.text(on, 0).partition("|")[2].startswith(answer)
    assert events[-1].data["errors"] == {kind: 1}
    assert events[-1].data["tool_calls"] == 1


def test_the_last_turn_and_the_last_tokens(shop: Scene) -> None:
    """The tool of a last turn is used, for it may be what the episode is worth; nobody reads its answer. So it is with
    an answer that has no room."""
    first = shop.first([call_of(item="tea")])
    cases: list[tuple[dict[str, Any], Finish]] = [
        ({"max_turns": 1}, Finish.TURNS),
        ({"max_response_length": len(first.mask) + 2}, Finish.LENGTH),
    ]
    for params, finish in cases:
        on, over, data = shop.answered(shop.act(first, ROW, episodes=f"calls/s1.episodes/{finish}/", **params))
        assert on is None
        assert over.finish.tolist() == [finish]
        assert over.responses.flat.tolist() == first.responses.flat.tolist()
        assert data["columns"][0].sample["score"].tolist() == [1 / 8]
    roomy = shop.act(first, ROW, episodes="calls/s1.episodes/x/", max_response_length=len(first.mask) + 3)
    assert shop.answered(roomy)[1] is None


def test_empty_turns_come_to_an_end(game: Scene) -> None:
    """Where `step` answers them, at the last turn."""
    batch = game.first([""])
    for _ in range(2):
        on, over, _ = game.answered(game.act(batch, max_turns=3))
        assert over is None
        batch = game.said(on, [""])
    on, over, _ = game.answered(game.act(batch, max_turns=3))
    assert on is None
    assert over.finish.tolist() == [Finish.TURNS]


def test_an_empty_turn_calls_no_tool(shop: Scene) -> None:
    assert shop.answered(shop.act(shop.first([""]), ROW))[1].finish.tolist() == [Finish.STOP]


def test_a_turn_that_was_cut_off_is_not_acted_on(shop: Scene) -> None:
    _, over, data = shop.answered(shop.act(shop.first([call_of(item="tea")], finish=Finish.LENGTH), ROW))
    assert over.finish.tolist() == [Finish.LENGTH]
    assert data["tool_calls"] == [0]


def test_rewards_of_turns(game: Scene) -> None:
    on, _, _ = game.answered(game.act(game.first(["ab", "abcd"])))
    on, _, _ = game.answered(game.act(game.said(on, ["a", ""])))
    last = game.said(on, ["end", "end"])
    _, over, data = game.answered(game.act(last))
    assert over.finish.tolist() == [Finish.ENVIRONMENT] * 2
    columns = Columns.align(over, data["columns"])
    assert columns.sample["score"].tolist() == [0.75, 1.0], "without get_reward: the sum"
    turns = over.turns
    for i, earned in enumerate(([0.5, 0.25, 0.0], [1.0, 0.0, 0.0])):
        rewards = Ragged(columns.token["turn_rewards"], over.responses.lengths)[i]
        anchors = Ragged(columns.token["anchor"], over.responses.lengths)[i]
        ends = [int(np.flatnonzero(turns[i] == t)[-1]) for t in range(3)]
        assert rewards[ends].tolist() == earned
        assert rewards.sum() == sum(earned)
        begins = [int(np.flatnonzero(turns[i] == t)[0]) for t in range(3)]
        assert np.flatnonzero(anchors).tolist() == begins
        assert len(set(anchors[begins].tolist())) == 3


def test_another_replica_leads_to_the_same_episode(game: Scene) -> None:
    """Whatever of it was answered before: recorded, held, or lost with the replica that had it."""
    on, _, _ = game.answered(game.act(game.first(["ab", "cd"])))
    held = game.act(game.said(on, ["ef", "gh"]))
    wanted = game.answered(held)[0]
    game.function = EnvironmentFunction()
    again = game.answered(game.act(game.said(on, ["ef", "gh"])))[0]
    assert again.encode() == wanted.encode()
    for key in game.exchange.list("calls/s1.episodes/gen/"):
        if "/t02." in key:
            game.exchange.delete(key)
    game.function = EnvironmentFunction()
    again = game.answered(game.act(game.said(on, ["ef", "gh"])))[0]
    assert again.encode() == wanted.encode(), "begun again, by its recorded turn"
    game.function = EnvironmentFunction()
    assert [event.kind for event in game.act(game.said(on, ["ef", "gh"]), prior=held[:-1])] == ["done"]


COUNTS = '''
from pathlib import Path
class Outside:
    """Answers what nobody can foresee: how often anybody has asked."""
    def reset(self, row):
        self.log, self.turns = Path(row["log"]), 0
    def step(self, text):
        with self.log.open("a") as file:
            file.write(text)
        self.turns += 1
        return f"{self.turns} of {len(self.log.read_text())}"
'''
STATE = """
    def state(self):
        return {"turns": self.turns}
    def restore(self, state):
        self.turns = state["turns"]
"""


def test_what_was_answered_is_never_asked_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, COUNTS + STATE, "Outside")
    row = {"log": str(tmp_path / "log")}
    on, _, _ = scene.answered(scene.act(scene.first(["a"]), row))
    scene.function = EnvironmentFunction()
    on, _, _ = scene.answered(scene.act(scene.said(on, ["b"]), row))
    scene.function = EnvironmentFunction()
    assert scene.text(on, 0) == "a|1 of 1=b|2 of 2="
    assert (tmp_path / "log").read_text() == "ab"
    scene.act(scene.first(["a"]), row)
    assert (tmp_path / "log").read_text() == "ab"


SLOW = """
from pathlib import Path
import time
class Slow:
    def reset(self, row):
        self.log, self.go = Path(row["log"]), Path(row["go"])
    def step(self, text):
        with self.log.open("a") as file:
            file.write(text)
        while text == "s" and not self.go.exists():
            time.sleep(0.005)
        return text.upper()
"""


def test_a_call_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    """Who is slow holds up nobody: what it is asked is handed back, and found answered by the call that brings it."""
    scene, cut = Scene(tmp_path, SLOW, "Slow"), threading.Event()
    row = {"log": str(tmp_path / "log"), "go": str(tmp_path / "go")}
    first = scene.first(["s", "a", "b"])
    (tmp_path / "log").touch()

    def once_all_are_asked() -> None:
        until(lambda: len((tmp_path / "log").read_text()) == 3)
        cut.set()

    asked = threading.Thread(target=once_all_are_asked)
    asked.start()
    *_, handed, done = scene.act(first.select([0, 1, 2]), row, cut=cut)
    asked.join()
    assert (handed.kind, handed.data["index"][0], done.kind) == ("cut", 0, "done")
    back = SampleBatch.decode(scene.exchange.get(handed.ref))  # type: ignore[arg-type]
    assert back.encode() == first.select([i for _, i in back.keys]).encode(), "as it came"
    (tmp_path / "go").touch()
    on, over, _ = scene.answered(scene.act(first, row))
    assert over is None
    assert [scene.text(on, i) for i in range(3)] == ["s|S=", "a|A=", "b|B="]
    assert sorted((tmp_path / "log").read_text()) == ["a", "b", "s"], "each was asked once"


def test_an_environment_that_cannot_be_begun_again_says_so(tmp_path: Path) -> None:
    scene = Scene(tmp_path, COUNTS, "Outside")
    row = {"log": str(tmp_path / "log")}
    on, _, _ = scene.answered(scene.act(scene.first(["a"]), row))
    scene.function = EnvironmentFunction()
    with pytest.raises(FatalError, match=r"answers turn 1 otherwise when it is asked again .* give it `state` and"):
        scene.act(scene.said(on, ["b"]), row)


BROKEN = """
import time
class Broken:
    def reset(self, row):
        if row["how"] == "reset":
            raise ValueError("no such world")
        self.how = row["how"]
    def step(self, text):
        if self.how == "hang":
            time.sleep(60)
        if self.how == "raise":
            1 / 0
        return {"type": 7, "nan": ("x", float("nan"))}.get(self.how)
    def get_reward(self):
        return {"none": None, "text": "1", "inf": float("inf")}.get(self.how, 1.0)
"""


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("reset", r"Broken raised ValueError: no such world \(.*environment.py:6\)"),
        ("raise", r"Broken raised ZeroDivisionError: division by zero"),
        ("type", r"Broken.step returned 7; wants text, or \(text, reward, done\)"),
        ("nan", r"Broken.step returned nan; wants a finite number"),
        ("none", r"Broken.get_reward returned None; wants a number"),
        ("text", r"Broken.get_reward returned '1'; wants a number"),
        ("inf", r"Broken.get_reward returned inf; wants a finite number"),
    ],
)
def test_an_environment_that_fails(tmp_path: Path, how: str, line: str) -> None:
    """Fails the call with one line, or its sample is dropped; never worth 0."""
    scene = Scene(tmp_path, BROKEN, "Broken")
    first = scene.first(["a"])
    with pytest.raises(FatalError, match=rf"^sample \(group 0, index 0\): .*{line}"):
        scene.act(first, {"how": how})
    _, over, data = scene.answered(scene.act(first, {"how": how}, on_error="drop"))
    assert over.finish.tolist() == [Finish.ENVIRONMENT]
    assert [(f["group"], f["index"]) for f in data["failed"]] == [(0, 0)]
    assert len(data["columns"][0].group) == 0


def test_an_environment_that_hangs(tmp_path: Path) -> None:
    """It is given up, and so is its replica when the others are answered; the next attempt finds all said."""
    scene = Scene(tmp_path, BROKEN, "Broken")
    first = scene.first(["a", "b"])
    params: dict[str, Any] = {"timeout_s": 0.3, "on_error": "drop"}
    with pytest.raises(ReplicaBroken, match="2 episodes hang"):
        scene.act(first, {"how": "hang"}, **params)
    scene.function = EnvironmentFunction()
    _, over, data = scene.answered(scene.act(first, {"how": "hang"}, **params))
    assert over.finish.tolist() == [Finish.ENVIRONMENT] * 2
    assert data["failed"][0]["message"].endswith("Broken took longer than 0.3 s")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("class E: pass", "has no method `reset`"),
        ("E = 3", "is int, wants a class"),
        ("class E:\n def reset(self): ...", "has neither; an environment has `step`, `run`, or public methods"),
        ("class E:\n def reset(self): ...\n def step(self, text): ...\n def look(self): ...", "has step and look"),
        (
            "class E:\n def reset(self): ...\n def look(self, at): ...",
            "tool look: parameter 'at' has no type",
        ),
        (
            "class E:\n def reset(self): ...\n def look(self, at: set): ...",
            "tool look: parameter 'at' is of type",
        ),
    ],
)
def test_a_class_that_is_no_environment(tmp_path: Path, code: str, line: str) -> None:
    scene = Scene(tmp_path, code, "E")
    with pytest.raises(FatalError) as error:
        scene.act(scene.first(["a"]))
    assert line in str(error.value)
