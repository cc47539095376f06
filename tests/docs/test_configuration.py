"""docs/configuration.md is what scripts/configuration makes of the schema, and says something about every key."""

from __future__ import annotations

import subprocess
from pathlib import Path

from orchestrator.api.confinement import text_keys

ROOT = Path(__file__).parents[2]


def test_the_reference_is_whole_and_of_this_schema() -> None:
    made = subprocess.run([ROOT / "scripts" / "configuration", "--print"], capture_output=True, text=True, check=True)
    found = (ROOT / "docs" / "configuration.md").read_text()
    assert made.stdout == found, "run scripts/configuration"
    keys, section = set[str](), ""
    for line in found.splitlines():
        if line.startswith("## "):
            section = line.strip("# []").replace("The job", "")
        elif line.startswith("| `"):
            key, kind, default, said = (cell.strip() for cell in line.strip("|").split(" | "))
            keys.add(f"{section}.{key.strip('`')}".lstrip("."))
            assert kind, line
            assert default, line
            assert said.endswith((".", ")", "|")), f"{section}.{key}: wants a sentence (a docstring, or SAID)"
    sections = ("algorithm.", "recipe_options.")
    texts = {key.removesuffix(".*") for key in text_keys() if not key.startswith(sections)}
    assert texts <= keys, "the keys of the same schema, walked another way"
    assert {"rollout.n", "functions.*.replicas", "algorithm.kl.coef", "train.lr", "data.prompt_key"} <= keys
