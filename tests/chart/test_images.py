"""scripts/images and the Dockerfiles, as far as they can be checked where no image can be built."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def images(*words: str, path: str = os.environ["PATH"], builder: str = "echo") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "images"), *words],
        env={"PATH": path, "BUILDER": builder}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_the_builder_is_asked_for() -> None:
    done = images("--tag", "1", "--prefix", "r.example.com/", "--push", "actor", "--", "--build-arg", "VARIANT=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "build --file Dockerfile.actor --tag r.example.com/rlhf-actor:1 --build-arg VARIANT=cpu .",
        "push r.example.com/rlhf-actor:1",
        "r.example.com/rlhf-actor:1",
    ]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    whole = images().stdout.splitlines()
    assert whole[1::2] == [f"dev.local/rlhf-{name}:{version}" for name in ("orchestrator", "actor", "trainer")]


def test_a_builder_that_fails_ends_it() -> None:
    assert images("actor", builder="false").returncode == 1


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    bare = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / "images")],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (bare.returncode, bare.stderr) == (1, "images: needs docker, podman or buildah on the PATH\n")
    assert images("actors").returncode == 2


@pytest.mark.parametrize("name", ["orchestrator", "actor", "trainer"])
def test_images_run_as_the_user_that_the_chart_sets_and_copy_what_is_not_ignored(name: str) -> None:
    text = (ROOT / f"Dockerfile.{name}").read_text()
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert source.split("/")[0] in kept, f"{source}: .dockerignore leaves it out"
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("image", ["orchestrator", "actor", "trainer"])
def test_an_image_is_tried_as_its_last_step_by_its_user(image: str) -> None:
    """What it imports exists here too: a module that moves takes its line along."""
    steps = (ROOT / f"Dockerfile.{image}").read_text().replace("\\\n", "").splitlines()
    last = [line for line in steps if line.startswith(("RUN", "COPY", "USER"))][-2:]
    assert last[0] == "USER 65532:65532"
    modules = re.findall(r"(?:functions|orchestrator)(?:\.\w+)+", last[1])
    assert modules
    for module in modules:
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
