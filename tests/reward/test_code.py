"""rule:code: tests in the forms that data sets have, run in the sandbox; and what fails is what failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from functions.call.function import FatalError
from functions.reward import code
from functions.reward.code import code_of, same_output
from functions.reward.scorer import Failed, Item, Scored
from functions.sandbox.local import LocalSandbox
from functions.sandbox.program import Limits, Program, Result, Sandbox, SandboxError

NONE = np.zeros(0, np.int32)
LIMITS = Limits(timeout_s=20, memory_mb=256)


def item(response: str, row: Mapping[str, Any], index: int = 0) -> Item:
    return Item(0, index, "", response, response, row, NONE, NONE)


def scores(sandbox: Sandbox, row: Mapping[str, Any], *responses: str, name: str = "code") -> list[float]:
    scorer = code.scorer(name, sandbox, LIMITS, remote=False, tick=lambda: None)
    results = scorer.score([item(response, row, i) for i, response in enumerate(responses)])
    assert all(isinstance(result, Scored) for result in results), results
    return [result.numbers["score"] for result in results if isinstance(result, Scored)]


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
ADD_MAIN = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
METHOD = "```python\nclass Solution:\n    def add(self, a: int, b: int) -> List[int]:\n        return a + b\n```"
TAKE_AWAY = "```python\ndef add(a, b):\n    return a - b\n```"

FORMS: dict[str, tuple[Any, str]] = {
    "verl, programs": ({"reward_model": {"ground_truth": json.dumps(
        {"inputs": ["1 2\n", "4 5"], "outputs": ["3\n", "9"]})}}, ADD_MAIN),
    "APPS, functions": ({"input_output": json.dumps(
        {"inputs": [[1, 2], [4, 5]], "outputs": [[3], 9], "fn_name": "add"})}, ADD),
    "LiveCodeBench, programs": ({"public_test_cases": json.dumps(
        [{"input": "1 2", "output": "3", "testtype": "stdin"}])}, ADD_MAIN),
    "LiveCodeBench, functions": ({"tests": [{"input": "1\n2", "output": "3", "testtype": "functional",
                                             "metadata": json.dumps({"func_name": "add"})}]}, METHOD),
    "TRL": ({"verification_info": {"language": "python", "test_cases": [
        {"input": "1 2\n", "output": "3\n", "type": "stdin_stdout", "fn_name": None}]}}, ADD_MAIN),
    "MBPP": ({"test_list": ["assert add(1, 2) == 3", "assert math.isclose(add(4, 5), 9)"],
              "test_setup_code": "import math"}, ADD),
    "verl, asserts": ({"ground_truth": json.dumps({"assert_case": ["assert add(1, 2) == 3"]})}, ADD),
    "HumanEval": ({"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}, ADD),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(sandbox: LocalSandbox, form: str) -> None:
    row, right = FORMS[form]
    assert scores(sandbox, row, right, TAKE_AWAY) == [1.0, 0.0]


def test_all_or_a_share(sandbox: LocalSandbox) -> None:
    row = {"tests": {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "5"]}}
    assert scores(sandbox, row, "print(input())") == [0.0]
    assert scores(sandbox, row, "print(input())", "syntax error(", name="code_fraction") == [0.75, 0.0]


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "def add(a, b):\n    import os; print('3'); os._exit(0)",
        "import os\nprint(open('test.json').read())",
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): raise ValueError",
    ],
)
def test_ending_early_passes_nothing(sandbox: LocalSandbox, cheat: str) -> None:
    for form in ("MBPP", "APPS, functions", "HumanEval"):
        assert scores(sandbox, FORMS[form][0], cheat) == [0.0]


def test_a_function_does_not_see_what_is_wanted(sandbox: LocalSandbox) -> None:
    """An object that equals everything is no JSON, and the comparison is not made where it is."""
    equal = "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(0)"
    assert scores(sandbox, FORMS["APPS, functions"][0], equal) == [0.0]


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("print(1)", "print(1)"),
        ("```python\na\n```\ntext\n```python\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("<think>```python\nno\n```</think>```py\nyes\n```", "yes\n"),
        ("so\n```python\ncut of", "cut of"),
    ],
)
def test_the_code_of_a_response(response: str, found: str) -> None:
    assert code_of(response) == found


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [("3\n", "3", True), (" 3 \n4\n", "3\n4", True), ("3.0", "3", True), ("1 2", "1  2.0", True), ("3", "4", False),
     ("3\n4", "3", False), ("a b", "a  b", False), ("", "", True), ("nan", "3", False)],
)  # fmt: skip
def test_same_output(printed: str, wanted: str, same: bool) -> None:
    assert same_output(printed, wanted) is same


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x"}, "the row has no tests"),
        ({"tests": "f(1) is 2"}, "neither JSON nor has an assert"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "1 inputs, 0 outputs"),
        ({"tests": {"inputs": ["1"]}}, "lacks 'outputs'"),
        ({"tests": {"inputs": [], "outputs": []}}, "tests has no test in it"),
        ({"tests": 3}, "int; wants an object or a list"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "graphical"}]}, "a test of type 'graphical'"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}, "without a function's name"),
        ({"verification_info": {"language": "cpp", "test_cases": []}}, "language 'cpp': rule:code runs python"),
        ({"tests": ["print(1)"]}, "a statement without an assert"),
        ({"tests": {"inputs": ["one"], "outputs": ["1"], "fn_name": "f"}}, "tests of unknown form in tests"),
    ],
)
def test_tests_of_no_known_form_are_named_in_one_line(row: Any, said: str) -> None:
    with pytest.raises(FatalError, match=said) as raised:
        code.tests_of(row, "rule:code")
    assert "\n" not in str(raised.value)


class Failing:
    """A sandbox that fails after some runs."""

    def __init__(self, runs: int) -> None:
        self.left = runs

    def run(self, program: Program) -> Result:
        self.left -= 1
        if self.left < 0:
            raise SandboxError("no room")
        return Result("finished", 0, program.stdin, "", 0.0)

    def close(self) -> None: ...


def test_a_sandbox_that_fails_is_no_score() -> None:
    row = {"tests": {"inputs": ["1", "2"], "outputs": ["1", "2"]}}
    scorer = replace(code.scorer("code", Failing(3), LIMITS, remote=False, tick=lambda: None), at_a_time=1)
    first, second = scorer.score([item("x", row), item("x", row, 1)])
    assert first == Scored({"score": 1.0})
    assert second == Failed("rule:code: sample (group 0, index 1): no room", retryable=True)


def test_a_limit_of_the_program_is_its_own_failure(sandbox: LocalSandbox) -> None:
    scorer = code.scorer("code", sandbox, Limits(timeout_s=0.2), remote=False, tick=lambda: None)
    [late] = scorer.score([item("while True: pass", FORMS["MBPP"][0])])
    assert late == Scored({"score": 0.0})
