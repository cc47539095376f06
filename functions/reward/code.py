"""Code scored by tests, in a sandbox: `rule:code` (1.0 where every test passes), `rule:code_fraction` (the share that
passes). Each test is a run of its own; those of a function are one run.

The code is the response's last fenced block in Python, else its last fenced block, else all of it; thoughts
(<think>...</think>) left out. The tests of a row stand in one of FIELDS, or are its ground truth; they are, as text in
JSON or as they are:

    {"inputs": [...], "outputs": [...]}                   a program, by standard input (APPS, TACO, verl's prime_code)
    {"inputs", "outputs", "fn_name": "f"}                 a function, or a method of `Solution`
    {"assert_case": [...]} or ["assert f(1) == 2", ...]   statements (verl's sandbox_fusion, MBPP's test_list)
    [{"input", "output", "testtype": "stdin" | "functional", "metadata": {"func_name"}}]          LiveCodeBench
    {"language": "python", "test_cases": [{"input", "output", "type", "fn_name"}]}                TRL, open-r1
    "def check(candidate): ..." with `entry_point`        HumanEval's `test`

A program's output is compared line by line, surrounding space aside, numbers as numbers (LiveCodeBench's rule). Of
functions the sandbox sees arguments only: what they return is compared out here. Statements run beside the code that
they test, where code that sets out to can deceive them (an object that equals everything); ending early cannot, as
they pass only once they have been run to the end.
"""

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from functions.call.function import FatalError
from functions.reward.scorer import Failed, Item, Scored
from functions.sandbox.program import Limits, Program, Result, Sandbox, SandboxError

FIELDS = ("tests", "test_cases", "verification_info", "input_output", "test_list", "test", "private_test_cases",
          "public_test_cases")  # fmt: skip
REMOTE_AT_A_TIME = 16
FENCE = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
PYTHON = ("python", "python3", "py")

HARNESS = """
import json, os, sys, types
with open("test.json") as file:
    told = json.load(file)
os.remove("test.json")
module = types.ModuleType("solution")
module.__dict__.update(__file__="/tmp/solution.py")
sys.modules["solution"] = module
exec("from typing import *; from collections import *; from functools import *; from itertools import *; "
     "from heapq import *; from bisect import *; import math, re, string, random, collections, itertools, functools, "
     "heapq, bisect, sys, os, json, operator, copy, datetime", module.__dict__)
with open("solution.py") as file:
    exec(compile(file.read(), "/tmp/solution.py", "exec"), module.__dict__)
if told["statements"]:
    exec(compile(told["statements"], "/tmp/test.py", "exec"), module.__dict__)
    print("\\n" + told["mark"] + "null", flush=True)
for number, arguments in enumerate(told["arguments"]):
    try:
        named = module.__dict__.get("Solution")
        function = getattr(named(), told["function"]) if named else module.__dict__[told["function"]]
        value = json.dumps(function(*arguments), default=list)
    except Exception:
        continue
    print(f"\\n{told['mark']}{number} {value}", flush=True)
"""


@dataclass(frozen=True)
class Test:
    """`function` "" and no statements: a program that reads `given` and prints `wanted`."""

    given: Any = ""
    wanted: Any = ""
    function: str = ""
    statements: str = ""

    def passed(self, code: str, sandbox: Sandbox, limits: Limits) -> bool:
        """Of a program or of statements. Raises SandboxError."""
        if not self.statements:
            result = sandbox.run(Program(code, stdin=self.given, limits=limits))
            return result.ok and same_output(result.stdout, self.wanted)
        mark, result = _harnessed(code, sandbox, limits, statements=self.statements)
        return result.ok and f"\n{mark}null\n" in result.stdout


def _harnessed(
    code: str, sandbox: Sandbox, limits: Limits, *, statements: str = "", function: str = "",
    arguments: Sequence[Any] = (),
) -> tuple[str, Result]:  # fmt: skip
    """The word before each value, which the code does not know, and the run."""
    mark = secrets.token_hex(16)
    told = {"function": function, "arguments": list(arguments), "statements": statements, "mark": mark}
    files = {"solution.py": code.encode("utf-8", "surrogatepass"), "test.json": json.dumps(told).encode()}
    return mark, sandbox.run(Program(HARNESS, files=files, limits=limits))


def functions_passed(tests: Sequence[Test], code: str, sandbox: Sandbox, limits: Limits) -> int:
    """How many of a function's tests pass, all in one run; those before a limit count. Raises SandboxError."""
    mark, result = _harnessed(
        code, sandbox, limits, function=tests[0].function, arguments=[test.given for test in tests]
    )
    values = dict(re.findall(rf"^{mark}(\d+) (.*)$", result.stdout, re.MULTILINE))
    return sum(same_value(values.get(str(i), ""), test.wanted) for i, test in enumerate(tests))


@dataclass(frozen=True)
class CodeScorer:
    """Scores as many samples at a time as the sandbox has room for."""

    name: str
    sandbox: Sandbox
    limits: Limits
    fraction: bool
    at_a_time: int
    tick: Callable[[], None]

    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        tests = [tests_of(item.row, f"{self.name}: {item.name}") for item in items]
        pool = ThreadPoolExecutor(self.at_a_time)
        try:
            running = [pool.submit(self._score, item, each) for item, each in zip(items, tests, strict=True)]
            results = []
            for future in running:
                while not future.done():
                    self.tick()
                    wait([future], timeout=0.5)
                results.append(future.result())
            return results
        finally:
            pool.shutdown(cancel_futures=True)

    def _score(self, item: Item, tests: Sequence[Test]) -> Scored | Failed:
        code, passed = code_of(item.response), 0
        try:
            if tests[0].function:
                passed = functions_passed(tests, code, self.sandbox, self.limits)
            for test in () if tests[0].function else tests:
                if test.passed(code, self.sandbox, self.limits):
                    passed += 1
                elif not self.fraction:
                    break
        except SandboxError as error:
            return Failed(f"{self.name}: {item.name}: {error}", retryable=True)
        return Scored({"score": passed / len(tests) if self.fraction else float(passed == len(tests))})


def scorer(name: str, sandbox: Sandbox, limits: Limits, *, remote: bool, tick: Callable[[], None]) -> CodeScorer:
    at_a_time = REMOTE_AT_A_TIME if remote else max(1, len(os.sched_getaffinity(0)))
    return CodeScorer(f"rule:{name}", sandbox, limits, name == "code_fraction", at_a_time, tick)


def code_of(response: str) -> str:
    """Its code: see the head of this module. An open fence at the end counts (a response that was too long)."""
    answer = response.rpartition("</think>")[2]
    blocks = [(label.strip().lower(), code) for label, code in FENCE.findall(answer)]
    python = [code for label, code in blocks if label in PYTHON]
    return python[-1] if python else blocks[-1][1] if blocks else answer


def same_output(printed: str, wanted: Any) -> bool:
    lines, right = ([line.strip() for line in text.strip().splitlines()] for text in (printed, str(wanted)))
    return len(lines) == len(right) and all(
        a == b or (_numbers(a) is not None and _numbers(a) == _numbers(b)) for a, b in zip(lines, right, strict=True)
    )


def _numbers(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def same_value(returned: str, wanted: Any) -> bool:
    """`returned` is JSON. A right value may stand in a list of its own (APPS)."""
    try:
        value = json.loads(returned)
    except ValueError:
        return False
    return value == wanted or (isinstance(wanted, list) and len(wanted) == 1 and value == wanted[0])


# --- a row's tests ---------------------------------------------------------------------------------------------------


def tests_of(row: Mapping[str, Any], where: str) -> list[Test]:
    """Raises FatalError, one line, for a row without tests or with tests of no known form."""
    field = next((name for name in FIELDS if row.get(name)), None)
    nested = row.get("reward_model")
    if field is not None:
        value = row[field]
    elif isinstance(nested, Mapping) and nested.get("ground_truth"):
        field, value = "reward_model.ground_truth", nested["ground_truth"]
    elif row.get("ground_truth"):
        field, value = "ground_truth", row["ground_truth"]
    else:
        wanted = ", ".join((*FIELDS, "reward_model.ground_truth", "ground_truth"))
        raise FatalError(f"{where}: the row has no tests; they stand in one of {wanted}; it has {', '.join(row)}")
    before = "\n".join([*(row.get("test_imports") or ()), row.get("test_setup_code") or ""]).strip()
    try:
        tests = _tests(value, str(row.get("entry_point") or ""), before)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise FatalError(f"{where}: tests of unknown form in {field}: {' '.join(reason.split())}") from error
    if not tests:
        raise FatalError(f"{where}: {field} has no test in it")
    return tests


def _tests(value: Any, entry_point: str, before: str) -> list[Test]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            if "assert" not in value:
                raise ValueError(f"text that is neither JSON nor has an assert: {value[:60]!r}") from None
            call = f"\ncheck({entry_point})\n" if entry_point and "def check(" in value else ""
            return [Test(statements=f"{before}\n{value}{call}")]
    if isinstance(value, Mapping):
        language = str(value.get("language", "python")).lower()
        if language not in PYTHON:
            raise ValueError(f"language {language!r}: rule:code runs python")
        if "test_cases" in value:
            return _tests(value["test_cases"], entry_point, before)
        if value.get("assert_case"):
            return _tests(list(value["assert_case"]), entry_point, before)
        inputs, outputs = value["inputs"], value["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs")
        function = str(value.get("fn_name") or "")
        return [_test(given, wanted, function) for given, wanted in zip(inputs, outputs, strict=True)]
    if not isinstance(value, Sequence):
        raise ValueError(f"{type(value).__name__}; wants an object or a list")
    found: list[Test] = []
    for case in value:
        if isinstance(case, str):
            if "assert" not in case:
                raise ValueError(f"a statement without an assert: {case[:60]!r}")
            found.append(Test(statements=f"{before}\n{case}"))
            continue
        kind = str(case.get("testtype") or case.get("type") or "stdin")
        metadata = case.get("metadata") or {}
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        function = str(case.get("fn_name") or metadata.get("func_name") or "")
        if kind not in ("stdin", "stdin_stdout", "functional", "function_call"):
            raise ValueError(f"a test of type {kind!r}; wants stdin, stdin_stdout, functional or function_call")
        if kind.startswith("function") != bool(function):
            raise ValueError(f"a test of type {kind!r} {'with' if function else 'without'} a function's name")
        found.append(_test(case["input"], case["output"], function))
    if len({test.function for test in found}) > 1:
        raise ValueError("tests of several functions, or of programs and functions; wants those of one")
    return found


def _test(given: Any, wanted: Any, function: str) -> Test:
    """Of a function, arguments in text are one JSON value a line, and what is wanted in text is JSON."""
    if not function:
        return Test(_lines(given), _lines(wanted))
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise ValueError(f"arguments of {function}: {type(given).__name__}; wants a list, or a JSON value a line")
    if isinstance(wanted, str):
        with contextlib.suppress(ValueError):  # text that is meant as it stands
            wanted = json.loads(wanted)
    return Test(given, wanted, function)


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
