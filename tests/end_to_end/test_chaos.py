"""scripts/chaos: a seed repeats its choices, what it spoils is brought back, and a short run finds nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from functions.exchange.base import ExchangeError
from functions.exchange.directory import DirectoryExchange
from functions.server.forkserver_client import FORKSERVER
from orchestrator.job.config import load_job
from tests.support.chaos import SETTINGS, VARIANTS, plan
from tests.support.chaos_stores import STORES, Stores
from tests.support.tiny_job import ENV, make_job

CHAOS = Path(__file__).parents[2] / "scripts" / "chaos"


def test_a_seed_repeats_its_choices() -> None:
    for store in STORES:
        assert plan(random.Random("3/1"), store) == plan(random.Random("3/1"), store)
    assert plan(random.Random("3/1"), "s3") != plan(random.Random("3/2"), "s3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_variants_are_jobs(tmp_path: Path, variant: str) -> None:
    load_job(make_job(tmp_path).file, [*VARIANTS[variant], *SETTINGS])


@pytest.mark.parametrize("how", ["truncate", "flip", "delete"])
def test_a_spoilt_record_cannot_be_read_and_comes_back(tmp_path: Path, how: str) -> None:
    for name in ("stores", "run"):
        (tmp_path / name).mkdir()
    exchange, stores = DirectoryExchange(tmp_path / "run"), Stores(tmp_path / "stores")
    for step in range(3):
        exchange.put_if_absent(f"journal/{step:06d}.json", b"record %d" % step)
    with stores.spoilt("directory", tmp_path / "run", "job", how, 0.9) as anything:
        assert anything
        with pytest.raises(ExchangeError):
            exchange.get("journal/000002.json")
        assert exchange.get("journal/000000.json") == b"record 0"
    assert exchange.get("journal/000002.json") == b"record 2"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", ["fp32", "tools"])
def test_a_short_run_finds_nothing(variant: str) -> None:
    words = [sys.executable, str(CHAOS), "0.5", "--seed", "1", "--only", f"{variant},directory"]
    env = {name: value for name, value in ENV.items() if name != FORKSERVER}  # it looks for agents below their jobs
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["jobs"] >= 1
    assert told["kills"] >= 1
    assert told["wrong"] == {}
