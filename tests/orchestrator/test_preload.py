"""What the orchestrator tells replicas to load, and when."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from functions.base.wire import Hint, Version, hint_key
from functions.call.train_params import KlParams
from functions.exchange.directory import DirectoryExchange
from orchestrator.calls.exchange import AsyncExchange
from orchestrator.job.roles import BY_NAME
from orchestrator.step.preload import Preload, penalty_models

ACTOR, BASE, CRITIC, COST = Version("actor", 2, "c"), Version("actor", 0), Version("critic", 2, "d"), Version("cost", 2)
SCORER = Version("reward", 0)
IN_REWARD = KlParams(where="reward", coef=0.1)
PPO = {"actor": ACTOR, "reference": BASE, "critic": CRITIC, "cost-critic": COST}


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(tmp_path)


def tell(exchange: DirectoryExchange, preload: Preload, *announced: dict[str, Version]) -> list[str]:
    """Announces in turn; the keys that the last one wrote."""

    async def all_of_them() -> None:
        for versions in announced:
            for key in exchange.list("hints/"):
                exchange.delete(key)
            await preload.announce(versions)

    asyncio.run(all_of_them())
    return exchange.list("hints/")


def loads(exchange: DirectoryExchange, function: str) -> list[tuple[str, dict[str, Version]]]:
    hint = Hint.from_json(json.loads(exchange.get(hint_key(function))))
    return [(load.operation, dict(load.weights)) for load in hint.loads]


def hints(exchange: DirectoryExchange, kl: KlParams | None, epoch: int = 1) -> Preload:
    return Preload(AsyncExchange(exchange), BY_NAME, kl, epoch)


def test_each_function_that_holds_versions_is_told_those_that_its_calls_will_name(exchange: DirectoryExchange) -> None:
    keys = tell(exchange, hints(exchange, IN_REWARD), PPO)
    told = ("cost-critic", "critic", "environment", "generate", "generate-tail", "reference", "reward")
    assert keys == [f"hints/{f}" for f in told]
    assert loads(exchange, "environment") == [], "it holds no version"
    assert loads(exchange, "generate") == loads(exchange, "generate-tail") == [("generate", {"policy": ACTOR})]
    assert loads(exchange, "critic") == [("values", {"model": CRITIC})]
    assert loads(exchange, "cost-critic") == [("values", {"model": COST})]
    assert loads(exchange, "reference") == [("logprobs", {"model": BASE}), ("logprobs", {"model": ACTOR})]
    assert loads(exchange, "reward") == [], "its scorer is no model"
    tell(exchange, hints(exchange, None), PPO | {"reward": SCORER})
    assert loads(exchange, "reward") == [("score", {"model": SCORER})]


def test_the_reference_alone_where_nothing_wants_the_actors_own(exchange: DirectoryExchange) -> None:
    for kl in (None, KlParams(where="loss")):
        tell(exchange, hints(exchange, kl), PPO)
        assert loads(exchange, "reference") == [("logprobs", {"model": BASE})]


def test_hints_are_written_where_they_change_and_by_each_execution(exchange: DirectoryExchange) -> None:
    first, later = {"actor": ACTOR, "reference": BASE}, {"actor": Version("actor", 3, "e"), "reference": BASE}
    one = Preload(AsyncExchange(exchange), ("generate", "reference", "train"), None, 1)
    assert tell(exchange, one, first) == ["hints/generate", "hints/reference"]
    assert tell(exchange, one, first) == []
    assert tell(exchange, one, later) == ["hints/generate"]
    assert loads(exchange, "generate") == [("generate", {"policy": later["actor"]})]
    resumed = Preload(AsyncExchange(exchange), ("generate", "reference", "train"), None, 2)
    assert tell(exchange, resumed, later) == ["hints/generate", "hints/reference"]
    assert json.loads(exchange.get("hints/generate"))["epoch"] == 2


def test_whose_logprobs_a_penalty_wants() -> None:
    assert penalty_models(None, PPO) == []
    assert penalty_models(KlParams(where="loss"), PPO) == ["reference"]
    assert penalty_models(IN_REWARD, PPO) == ["reference", "actor"]
    assert penalty_models(IN_REWARD, {"actor": ACTOR, "reference": BASE}) == ["reference"]
