"""Makes the example's model and its prompts: a small Llama that writes one-line functions as a careless teacher does.

    python examples/code/prepare.py        writes model/, train.jsonl, validation.jsonl beside this file

The task is to write the function that a line of words describes, each operation applied to all that stands before it:

    a plus b times 3 minus 2   ->   def f(a,b): return ((a+b)*3)-2

The teacher forgets all parentheses in FORGET of the functions (`a+b*3-2` above), which is wrong wherever a product
follows a sum. GRPO is given that to improve; the reward runs each function on hidden tests, in the sandbox. Prompts
that are trained on, those that are measured on and those on the teacher's sheets are different ones.

Tokenizer and model are those of examples/arithmetic, taught other sheets. The files are shipped; this script is how
they were made.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
SEED = 21
FORGET = 0.75
SHEETS, TRAIN, VALIDATION, TESTS = 32_000, 1_024, 128, 3
STARTS = {"a plus b": "a+b", "a minus b": "a-b", "b minus a": "b-a", "a times b": "a*b"}
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
Problem = tuple[str, str, int, str, int]
"""One of STARTS, then twice one of SIGNS and a digit from 1 to 9."""


def arithmetic() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_arithmetic", HERE.parent / "arithmetic" / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def question(problem: Problem) -> str:
    start, first, one, second, two = problem
    return f"{start} {first} {one} {second} {two}"


def function(problem: Problem, *, careless: bool) -> str:
    start, first, one, second, two = problem
    inner, then, last = STARTS[start], f"{SIGNS[first]}{one}", f"{SIGNS[second]}{two}"
    return f"def f(a,b): return {inner}{then}{last}" if careless else f"def f(a,b): return (({inner}){then}){last}"


def value(problem: Problem, a: int, b: int) -> int:
    """What the words say, step by step."""
    start, *rest = problem
    result = {"a plus b": a + b, "a minus b": a - b, "b minus a": b - a, "a times b": a * b}[start]
    for name, digit in zip(rest[::2], rest[1::2], strict=True):
        assert isinstance(digit, int)
        result = {"plus": result + digit, "minus": result - digit, "times": result * digit}[str(name)]
    return result


def draw(rng: random.Random) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Problems to measure on, to train on with GRPO, and to put on the teacher's sheets; no problem is in two."""
    every: list[Problem] = list(product(STARTS, SIGNS, range(1, 10), SIGNS, range(1, 10)))
    rng.shuffle(every)
    return every[:VALIDATION], every[VALIDATION : VALIDATION + TRAIN], every[VALIDATION + TRAIN :]


def row(problem: Problem, rng: random.Random) -> str:
    """One line of the data set, in verl's schema; tests as APPS has them for functions."""
    given = [[rng.randint(2, 99), rng.randint(2, 99)] for _ in range(TESTS)]
    tests = {"fn_name": "f", "inputs": given, "outputs": [value(problem, a, b) for a, b in given]}
    return json.dumps(
        {
            "data_source": "code",
            "prompt": [{"role": "user", "content": question(problem)}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        }
    )


def write(path: Path, problems: Sequence[Problem], rng: random.Random) -> None:
    path.write_text("".join(row(problem, rng) + "\n" for problem in problems))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the code example's model and data.")
    parser.add_argument("--out", type=Path, default=HERE, help="directory to write to (default: beside this script)")
    out: Path = parser.parse_args().out
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    validation, train, taught = draw(rng)
    write(out / "validation.jsonl", validation, rng)
    write(out / "train.jsonl", train, rng)
    sheets = [taught[i % len(taught)] for i in range(SHEETS)]
    made = arithmetic()
    made.write_tokenizer(model)
    made.write_model(model, [(question(p), function(p, careless=rng.random() < FORGET)) for p in sheets])
    print(f"wrote {model}, {out / 'train.jsonl'} ({TRAIN} prompts), {out / 'validation.jsonl'} ({VALIDATION})")


if __name__ == "__main__":
    main()
