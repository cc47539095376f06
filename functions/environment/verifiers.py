"""A taskset of verifiers (v1: Taskset, Env, Harness) as an environment: `verifiers:ID`, `verifiers:ID?harness=null`.

Its episodes are harnesses (harness.py): the client of verifiers asks the episode's own URL, the sum of its rewards is
the episode's. A row's `task` is the task's place in the taskset. `env` names an Env other than the taskset's, `harness`
one for its agent, `runtime` where that runs (else subprocess: in a process here); whatever else is said is a setting of
the taskset (`verifiers:harbor?runtime=docker&dataset=org/name`). Tasksets that come with the package (harbor, openenv,
nemo_gym, textarena) come along. Wants the package verifiers, 0.4 or newer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any
from urllib.parse import parse_qsl

from functions.base.wire import Json
from functions.call.function import FatalError
from functions.environment.base import EnvironmentFailed, Said, finite
from functions.environment.harness import HarnessEpisode


class VerifiersKind:
    """Raises FatalError, in one line, for a taskset that does not load, its first task included."""

    tools: Sequence[Json] = ()
    asks = True

    def __init__(self, what: str) -> None:
        self.name = f"verifiers:{what}"
        try:
            from verifiers import v1
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise FatalError(f"{self.name} wants the package verifiers, 0.4 or newer: {error}") from error
        id, _, query = what.partition("?")
        said = dict(parse_qsl(query))
        agent: Json = {"runtime": {"type": said.pop("runtime", "subprocess")}}
        agent |= {"harness": {"id": said.pop("harness")}} if "harness" in said else {}
        env = said.pop("env", "")
        try:
            self._env: Any = load_environment(
                resolve_env_config({"id": env, "taskset": {"id": id, **said}, "agent": agent})
            )
            self._unread = iter(self._env.taskset)
            self._tasks = [task for task in [next(self._unread, None)] if task is not None]
        except Exception as error:
            raise FatalError(f"{self.name}: {type(error).__name__}: {' '.join(str(error).split())}") from error
        self._v1 = v1
        self._lock, self._served = threading.Lock(), False
        self._loop, self._died = asyncio.new_event_loop(), Future[Any]()

    def episode(self) -> VerifiersEpisode:
        return VerifiersEpisode(self)

    def task(self, number: Any) -> Any:
        """Raises EnvironmentFailed."""
        with self._lock:
            while type(number) is int and len(self._tasks) <= number and (task := next(self._unread, None)) is not None:
                self._tasks.append(task)
        if type(number) is not int or not 0 <= number < len(self._tasks):
            raise EnvironmentFailed(f"{self.name}: the row's task is {number!r:.40}; wants a place in the taskset")
        return self._tasks[number]

    def play(self, task: Any, base_url: str) -> Any:
        """One episode, in the loop in which the Env's resources are served."""
        with self._lock:
            if not self._served:
                threading.Thread(target=self._serve, name="verifiers", daemon=True).start()
                self._serving = self._env.serving()
                self._result(self._serving.__aenter__())
                self._served = True
        client = self._v1.EvalClientConfig(base_url=base_url, api_key_var="RLHF_NO_KEY")
        context = self._v1.ModelContext(model="policy", client=client)
        return self._result(self._env.run_episode(task, context))

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        except SystemExit as error:  # the package says so that it lacks something
            self._died.set_exception(EnvironmentFailed(f"{self.name}: {error}"))

    def _result(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        wait((future, self._died), return_when=FIRST_COMPLETED)
        return (future if future.done() else self._died).result()


class VerifiersEpisode(HarnessEpisode):
    def __init__(self, kind: VerifiersKind) -> None:
        super().__init__(kind.name, self._play, self._worth)
        self._kind, self._task, self._score = kind, None, 0.0

    def begin(self, row: Mapping[str, Any], seed: int) -> None:
        self._task = self._kind.task(row.get("task"))
        super().begin(row, seed)

    def _play(self, base_url: str) -> None:
        played = self._kind.play(self._task, base_url)
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            raise EnvironmentFailed(f"{self._kind.name}: {errors[0].type}: {errors[0].message}" if errors else "failed")
        self._score = sum(finite(trace.reward, f"{self._kind.name}: the reward") for trace in played.traces)

    def _worth(self, said: Said) -> float:
        return self._score
