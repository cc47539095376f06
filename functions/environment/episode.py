"""One turn of one episode: taken from the record, or asked once and recorded.

    turn n ends --> record has it? --yes--> what it says
                       no
                       v
                    the episode as it was after turn n - 1:   held in this replica,
                                                              or begun again and restored: from recorded state,
                                                              or by its recorded turns, whose answers must be the same
                       v
                    act(turn n), reward where it is over --put_if_absent--> record

    calls/s000003.episodes/<generation>/g7.i0/t02.<digest of all tokens so far>

So whoever is killed (an environment's replica, one that generates, the orchestrator), the next attempt leads to the
same episode, and what was answered is never asked again; what was asked and not answered yet, is.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from functions.base.samples import Finish
from functions.base.wire import Json
from functions.call import userfile
from functions.call.function import FatalError
from functions.environment.base import Answer, EnvironmentFailed, Said
from functions.environment.kinds import Episode, Kind
from functions.exchange.base import Exchange, ExchangeError, NotFound

LIFETIME_S = 2 * 86400.0


@dataclass(frozen=True)
class Outcome:
    """Of one turn. `finish` UNFINISHED: the episode goes on with the answer's observations."""

    answer: Answer
    finish: Finish
    score: float | None = None
    """Of an episode that is over."""

    def encode(self) -> bytes:
        value = {"answer": self.answer.to_json(), "finish": int(self.finish), "score": self.score}
        return json.dumps(value, allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        value: Json = json.loads(data)
        return cls(Answer.from_json(value["answer"]), Finish(value["finish"]), value["score"])

    @classmethod
    def failure(cls, message: str) -> Self:
        return cls(Answer(failed=" ".join(message.split())), Finish.ENVIRONMENT)


@dataclass(frozen=True)
class Turn:
    """What is to be answered: the last turn of a sample."""

    name: str
    """Of the sample, for messages."""
    row: Mapping[str, Any]
    seed: int
    said: Sequence[Said | None]
    """All turns. None, before them: what the environment asks first, where it makes the prompt."""
    keys: Sequence[str]
    """Of their records."""
    last: bool
    """No further turn is left."""
    fits: Callable[[Answer], bool]
    """Whether its observations, and a token after them, have room."""


class Episodes:
    """The episodes that this replica holds, by the key of their latest turn's record."""

    def __init__(self) -> None:
        self._held: dict[str, Episode] = {}

    def take(self, key: str) -> Episode | None:
        return self._held.pop(key, None)

    def keep(self, key: str, episode: Episode) -> None:
        self._held[key] = episode

    def forget(self, prefix: str) -> None:
        """All but those whose keys begin so."""
        for key in [key for key in self._held if not key.startswith(prefix)]:
            close(self._held.pop(key))


def play(
    turn: Turn, kind: Kind, exchange: Exchange, held: Episodes, timed: Callable[[], None] = lambda: None
) -> Outcome:
    """The outcome of a turn; `timed` is called before each thing that is asked of the environment. An environment that
    fails is an outcome; what is raised is a store's, or FatalError for a class that is none."""
    recorded = read(exchange, turn.keys[-1])
    if recorded is not None:
        return recorded
    begun_s = time.perf_counter()
    episode: Episode | None = None
    try:
        episode = _resumed(turn, kind, exchange, held, timed)
        outcome = _ask(turn, episode, timed)
    except (FatalError, ExchangeError):
        raise
    except EnvironmentFailed as error:
        outcome = Outcome.failure(f"{turn.name}: {error}")
    except Exception as error:
        outcome = Outcome.failure(f"{turn.name}: {kind.name} raised {userfile.describe(error)}")
    outcome = replace(outcome, answer=replace(outcome.answer, seconds=round(time.perf_counter() - begun_s, 6)))
    timed()
    final = write(exchange, turn.keys[-1], outcome)
    if episode is not None and final is outcome and outcome.finish == Finish.UNFINISHED:
        held.keep(turn.keys[-1], episode)
    elif episode is not None:
        close(episode)
    return final


def read(exchange: Exchange, key: str) -> Outcome | None:
    try:
        return Outcome.decode(exchange.get(key))
    except NotFound:
        return None


def write(exchange: Exchange, key: str, outcome: Outcome) -> Outcome:
    """What the record says from now on: this, unless another attempt was first."""
    try:
        data = outcome.encode()
    except (TypeError, ValueError) as error:
        outcome = Outcome.failure(f"what the environment said has no JSON form: {error}")
        data = outcome.encode()
    if exchange.put_if_absent(key, data, lifetime_s=LIFETIME_S) is not None:
        return outcome
    return read(exchange, key) or outcome


def close(episode: Episode) -> None:
    try:
        episode.close()
    except Exception as error:  # nobody depends on it any more
        userfile.describe(error)


def _resumed(turn: Turn, kind: Kind, exchange: Exchange, held: Episodes, timed: Callable[[], None]) -> Episode:
    """The episode after the turns before this one."""
    before = [*zip(turn.said, turn.keys, strict=True)][:-1]
    if before and (episode := held.take(before[-1][1])) is not None:
        return episode
    timed()
    episode = kind.episode()
    timed()
    episode.begin(turn.row, turn.seed)
    if not before or episode.stateless:
        return episode
    if episode.restores:
        told = read(exchange, before[-1][1])
        if told is None:
            raise EnvironmentFailed(f"the record of its turn {len(before)} is lost")
        timed()
        episode.restore(told.answer.state)
        return episode
    for number, (said, key) in enumerate(before, start=before[0][0] is not None):
        timed()
        answer, told = episode.act(said), read(exchange, key)
        if told is not None and (list(told.answer.observations), told.answer.asked) != (
            list(answer.observations), answer.asked
        ):  # fmt: skip
            raise EnvironmentFailed(
                f"{kind.name} answers turn {number} otherwise when it is asked again to come to turn "
                f"{len(before) + 1} on another replica: give it `state` and `restore`, or `stateless = True`"
            )
    return episode


def _ask(turn: Turn, episode: Episode, timed: Callable[[], None]) -> Outcome:
    answer, said = Answer(), turn.said[-1]
    if said is None or not said.cut_off:
        timed()
        answer = episode.act(said)
    finish = _finish(turn, answer)
    if finish == Finish.UNFINISHED:
        timed()
        return Outcome(replace(answer, state=episode.state()), finish)
    timed()
    if said is None:
        raise EnvironmentFailed("its first request has no room: data.max_prompt_length is for it, too")
    return Outcome(answer, finish, episode.reward(said))


def _finish(turn: Turn, answer: Answer) -> Finish:
    if turn.said[-1] is not None and turn.said[-1].cut_off:
        return Finish.LENGTH
    if answer.done:
        return Finish.ENVIRONMENT
    if not answer.observations:
        return Finish.STOP
    if turn.last:
        return Finish.TURNS
    return Finish.UNFINISHED if turn.fits(answer) else Finish.LENGTH
