"""An OpenEnv server as an environment: `openenv:http://...`, by its own generic client. Wants the package openenv.

A turn's text is the action's one field: `?action=code` of the URL names it ("message" without); what it observes is
the observation's field `?observation=output`, or all of it as JSON. One session of the server for each episode, so
that the server bounds how many there are; an episode is begun again by its turns (`reset` gets the seed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from functions.base.wire import Json
from functions.call.function import FatalError
from functions.environment.base import Answer, EnvironmentFailed, Said, Unrestored, finite, text_of


class OpenEnvKind:
    """Raises FatalError, in one line, without the package."""

    tools: Sequence[Json] = ()
    asks = False

    def __init__(self, url: str) -> None:
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ImportError as error:
            raise FatalError(f"openenv:{url} wants the package openenv (pip install openenv)") from error
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise FatalError(f"openenv:{url} names no server; wants openenv:http://...")
        fields = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self.action, self.observation = fields.pop("action", "message"), fields.pop("observation", None)
        if fields:
            raise FatalError(f"openenv:{url}: {', '.join(fields)} is none of action, observation")
        self.name, self._client = f"openenv:{url}", GenericEnvClient
        self._url = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))

    def episode(self) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, self._client(base_url=self._url).sync())


class OpenEnvEpisode(Unrestored):
    def __init__(self, kind: OpenEnvKind, client: Any) -> None:
        self._kind, self._client = kind, client

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        self._client.connect()
        self._client.reset(seed=seed % (1 << 31))

    def act(self, said: Said | None) -> Answer:
        assert said is not None, "it asks nothing first"
        result = self._client.step({self._kind.action: said.text})
        who = f"{self._kind.name}: the observation"
        told = result.observation
        if self._kind.observation is not None:
            if self._kind.observation not in told:
                raise EnvironmentFailed(f"{who} has no {self._kind.observation!r}; it has {', '.join(told)}")
            told = told[self._kind.observation]
        reward = None if result.reward is None else finite(result.reward, f"{self._kind.name}: the reward")
        return Answer([] if result.done else [("", text_of(told, who))], reward, bool(result.done))

    def close(self) -> None:
        self._client.close()
