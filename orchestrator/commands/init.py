"""Writes a commented job file for a model and a data set; asks nothing that it can find out.

Found out: the column of the prompts, whether they want the chat template, what to validate on, a rule for the right
answers, how long prompts and responses are, how many prompts fit a step. Where no rule fits, reward.py is written too.
"""

import re
from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestrator.base.errors import ConfigError
from orchestrator.job.config import load_job
from orchestrator.job.draft import draft
from orchestrator.job.hub import HubId
from orchestrator.recipes import find_recipe

HELP = "write a commented job file for a model and a data set"
EXAMPLE = "rlhf-orchestrate init Qwen/Qwen2.5-0.5B-Instruct openai/gsm8k/main --recipe grpo"
REWARD = '''"""The reward: a number for each response, higher is better."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """`solution_str` is the response; `extra_info` and the row's further columns come with it."""
    raise NotImplementedError("score the response here")
'''


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="Hugging Face model directory, or id of the Hub (ORG/NAME)")
    parser.add_argument("data", help="JSONL or parquet file, or id of the Hub (ORG/NAME/CONFIG:SPLIT)")
    parser.add_argument("-o", "--output", type=Path, default=Path("job.toml"), help="file to write (default: job.toml)")
    parser.add_argument("--recipe", default="grpo", help="`rlhf-orchestrate recipes` lists them (default: grpo)")


def execute(given: Namespace) -> int:
    job: Path = given.output
    recipe = find_recipe(given.recipe)
    if job.exists():
        raise ConfigError(f"{job}: is there already; name another file with --output")
    id = HubId.parse(given.data)
    data = Path(given.data).stem if id is None or Path(given.data).exists() else id.repository.partition("/")[2]
    name = re.sub(r"[^a-z0-9]+", "-", f"{data}-{given.recipe}".lower()).strip("-")[:48].strip("-")
    found = draft(name, given.recipe, given.model, given.data, job.parent, given=bool(recipe.given))
    job.parent.mkdir(parents=True, exist_ok=True)
    job.write_text(found.text, encoding="utf-8")
    load_job(job)
    reward = job.parent / "reward.py"
    if found.own_reward and not reward.exists():
        reward.write_text(REWARD)
        print(f"{reward}: write your reward there")
    print(f"{job}: look it through, then `rlhf-orchestrate run {job}`")
    return 0
