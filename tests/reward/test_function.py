"""The reward function on a real exchange and tokenizer: scores joined to samples, failures named, nothing made 0."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from functions.base.samples import Columns, Finish, Ragged, SampleBatch
from functions.base.wire import Call, Event, Ref, Version
from functions.call.function import Cancelled, Context, FatalError, RetryableError
from functions.call.meter import Meter
from functions.exchange.directory import DirectoryExchange
from functions.reward.function import RewardFunction
from functions.weights.manifest import Manifest, manifest_key

POLICY = Version("actor", 0)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ANSWERS = {0: "4", 1: "9"}
ROWS = {
    str(g): {"data_source": "sums", "prompt": f"{g}?", "reward_model": {"ground_truth": a}, "extra_info": {"n": g}}
    for g, a in ANSWERS.items()
}


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and <end> as a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()


class Bench:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.exchange = DirectoryExchange(str(root / "exchange"))
        files = {"tokenizer.json": self.exchange.durable.put("t/tokenizer.json", TOKENIZER.to_str().encode())}
        manifest = Manifest(POLICY, None, (), files=files)
        self.exchange.durable.put(manifest_key(POLICY), manifest.encode())
        self.function = RewardFunction()

    def samples(self, responses: Mapping[tuple[int, int], str], finish: Finish = Finish.STOP) -> Ref:
        rows = [TOKENIZER.encode(text + "<end>").ids for text in responses.values()]
        tokens = sum(map(len, rows))
        groups = sorted({g for g, _ in responses})
        batch = SampleBatch(
            prompts=Ragged.from_rows([TOKENIZER.encode(f"{g}?").ids for g in groups], np.int32),
            prompt=np.array([groups.index(g) for g, _ in responses], np.int32),
            group=np.array([g for g, _ in responses], np.int32),
            index=np.array([i for _, i in responses], np.int32),
            responses=Ragged.from_rows(rows, np.int32),
            logprobs=np.zeros(tokens, np.float32),
            mask=np.ones(tokens, np.float32),
            finish=np.full(len(rows), finish, np.int32),
            version=np.zeros(len(rows), np.int32),
        )
        return self.exchange.put(f"in/{len(self.exchange.list('in/'))}", batch.encode())

    def score(
        self, responses: Mapping[tuple[int, int], str], score: str, rows: Mapping[str, Any] = ROWS, **params: Any
    ) -> tuple[dict[str, dict[tuple[int, int], float]], Mapping[str, Any], Event]:
        inputs = {"samples": [self.samples(responses)], "rows": [self.exchange.put("rows", json.dumps(rows).encode())]}
        call = Call("c", "score", inputs, {"policy": POLICY}, {"score": score, **params})
        meter = Meter("score", {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
        [done] = list(self.function.call(call, Context(self.exchange, str(self.root), meter=meter)))
        self.spans = {span.name: span.id for span in meter.spans}
        assert done.ref is not None
        columns = Columns.decode(self.exchange.get(done.ref))
        who = list(zip(columns.group.tolist(), columns.index.tolist(), strict=True))
        return {n: dict(zip(who, v.tolist(), strict=True)) for n, v in columns.sample.items()}, done.data, done

    def file(self, body: str) -> str:
        (self.root / "reward.py").write_text(body)
        return f"{self.root / 'reward.py'}"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


RESPONSES = {(0, 0): "4", (0, 1): "5", (1, 0): "9", (1, 1): " 9 "}


def test_a_rule_scores_each_sample_against_its_own_row(bench: Bench) -> None:
    scores, data, _ = bench.score(RESPONSES, "rule:exact")
    assert scores == {"score": {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0}}
    texts = [json.loads(line) for line in bench.exchange.get(Ref.from_json(data["texts"])).splitlines()]
    first = {"group": 0, "index": 0, "prompt": "0?", "response": "4", "score": 1.0, "finish": "stop", "version": 0}
    assert texts[0] == first | {"tokens": 2, "pred": "4", "ground_truth": "4"}  # the special token counts
    assert [t["score"] for t in texts] == [1.0, 0.0, 1.0, 1.0]


def test_verl_form(bench: Bench) -> None:
    name = bench.file(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'sums'\n"
        "    right = solution_str.strip() == ground_truth\n"
        "    return {'score': float(right), 'acc': True, 'n': extra_info['n'], 'pred': 'x'}"
    )
    scores, _, _ = bench.score(RESPONSES, f"{name}:compute_score")
    assert scores["score"] == {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0}
    assert scores["n"] == {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0}
    assert set(scores) == {"score", "acc", "n"}


def test_trl_form_with_columns_and_messages(bench: Bench) -> None:
    rows = {"0": {"prompt": [{"role": "user", "content": "2+2"}], "answer": "4"}, "1": {"prompt": "3*3", "answer": "9"}}
    name = bench.file(
        "def reward(prompts, completions, answer, completion_ids, **kwargs):\n"
        "    assert kwargs == {}, kwargs\n"
        "    assert prompts[0] == [{'role': 'user', 'content': '2+2'}] and prompts[2] == '3*3'\n"
        "    assert completions[0] == [{'role': 'assistant', 'content': '4'}]\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    return [len(i) + (t == a) / 2 for t, a, i in zip(texts, answer, completion_ids)]"
    )
    scores, _, _ = bench.score(RESPONSES, f"{name}:reward", rows)
    assert scores["score"] == {(0, 0): 2.5, (0, 1): 2.0, (1, 0): 2.5, (1, 1): 4.0}


def test_trl_form_without_kwargs_gets_what_it_names_and_may_be_async(bench: Bench) -> None:
    name = bench.file("async def reward(completions):\n    return [len(c) for c in completions]")
    scores, _, _ = bench.score(RESPONSES, f"{name}:reward")
    assert scores["score"][1, 1] == 3.0


VERL = "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
HERE = r"sample \(group 0, index 1\)"
BAD = {
    "    if solution_str == '5': {}['k']\n    return 1": rf"f raised on {HERE}: KeyError: 'k' \(.*reward.py:2\)",
    "    return None if solution_str == '5' else 1": rf"f returned None for {HERE}; wants a number",
    "    return '1' if solution_str == '5' else 1": rf"f returned '1' for {HERE}; wants a number",
    "    return float('nan') if solution_str == '5' else 1": rf"returned nan for {HERE}; wants a finite number",
    "    return 1e39 if solution_str == '5' else 1": rf"returned 1e\+39 for {HERE}; wants a finite number of float32",
    "    return {'acc': 1} if solution_str == '5' else 1": rf"a dict without \"score\" for {HERE}",
    "    return {'score': 1, 'a': 1} if solution_str == '5' else 1": rf"\['a'\] for some samples .*{HERE}",
    """
    import time
    while solution_str == '5':
        try: time.sleep(9)
        except Exception: pass
    return 1""": rf"f took longer than 1 s on {HERE}",
    """
    try: return 1 if solution_str != '5' else __import__('time').sleep(9)
    except BaseException: return 0""": rf"f took longer than 1 s on {HERE}",
    """
    import re
    if solution_str == '5': re.match('(a+)+b', 'a' * 40)
    return 1""": rf"f took longer than 1 s on {HERE}",
}
FAILURES = [(VERL + body, message) for body, message in BAD.items()]
FAILURES += [
    ("def f(completions):\n    return [1 / (c != '5') for c in completions]", rf"f raised on {HERE}: ZeroDivision")
]


@pytest.mark.parametrize(("body", "message"), FAILURES)
def test_a_failure_names_the_sample_and_is_never_a_score(bench: Bench, body: str, message: str) -> None:
    name = bench.file(body)
    with pytest.raises(FatalError, match=message) as failure:
        bench.score(RESPONSES, f"{name}:f", timeout_s=1.0)
    assert "\n" not in str(failure.value)
    scores, data, _ = bench.score(RESPONSES, f"{name}:f", timeout_s=1.0, on_error="drop")
    assert scores["score"] == {(0, 0): 1.0, (1, 0): 1.0, (1, 1): 1.0}
    assert [(f["group"], f["index"]) for f in data["failed"]] == [(0, 1)]
    texts = [json.loads(line) for line in bench.exchange.get(Ref.from_json(data["texts"])).splitlines()]
    assert texts[1]["score"] is None
    assert texts[1]["error"] == data["failed"][0]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(completions):\n    return [1.0]", r"returned 1 scores for 4 samples"),
        ("def f(completions):\n    return 1.0", r"returned float for sample .* wants a list of numbers"),
        ("def f(a, b):\n    return 1", r"takes \(a, b\); wants verl's"),
        ("f = 3", r"wants a function"),
        ("g = 3", r"has no 'f'"),
        ("def f(:", r"cannot be imported: SyntaxError: .*reward.py:1"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*reward.py:1\)"),
    ],
)
def test_a_wrong_function_fails_the_call(bench: Bench, body: str, message: str) -> None:
    with pytest.raises(FatalError, match=message):
        bench.score(RESPONSES, f"{bench.file(body)}:f")


def test_a_batch_of_the_wrong_length_drops_nobody_silently(bench: Bench) -> None:
    name = bench.file("def f(completions):\n    return [1.0] * (len(completions) + 1)")
    scores, data, _ = bench.score(RESPONSES, f"{name}:f", on_error="drop")
    assert scores == {"score": {}}
    assert len(data["failed"]) == 4


@pytest.mark.parametrize(
    ("score", "params", "message"),
    [
        ("rule:nonsense", {}, r"unknown rule 'nonsense'; rules: exact, number"),
        ("/nowhere/reward.py:f", {}, r"cannot read /nowhere/reward.py: No such file"),
        ("model", {}, r"needs the version of the reward model"),
        ("rule:exact", {"on_error": "zero"}, r"on_error: got 'zero', wants one of 'fail', 'drop'"),
        ("rule:exact", {"timeout_s": 0}, r"timeout_s is 0"),
        ("rule:exact", {"temperature": 1}, r"params of score: unknown key 'temperature'"),
        ("nothing", {}, r"'nothing' names no object"),
    ],
)
def test_bad_params(bench: Bench, score: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(FatalError, match=message):
        bench.score(RESPONSES, score, **params)


def test_missing_answers_and_rows_are_named(bench: Bench) -> None:
    with pytest.raises(FatalError, match=r"it has prompt, foo"):
        bench.score(RESPONSES, "rule:exact", {"0": {"prompt": "", "foo": 1}, "1": {"answer": "9"}})
    with pytest.raises(FatalError, match=r"lack group 1"):
        bench.score(RESPONSES, "rule:exact", {"0": ROWS["0"]})


def test_unfinished_samples_and_other_operations_are_refused(bench: Bench) -> None:
    inputs = {"samples": [bench.samples({(0, 0): "4"}, Finish.UNFINISHED)], "rows": [bench.exchange.put("r", b"{}")]}
    context = Context(bench.exchange, str(bench.root))
    with pytest.raises(FatalError, match=r"sample \(group 0, index 0\) is unfinished"):
        list(bench.function.call(Call("c", "score", inputs, {"policy": POLICY}, {"score": "rule:exact"}), context))
    with pytest.raises(FatalError, match=r"no operation 'train'"):
        list(bench.function.call(Call("c", "train"), context))


def test_a_cancelled_call_ends_between_samples(bench: Bench) -> None:
    name = bench.file(VERL + "    open(__file__ + '.count', 'a').write('x')\n    return 1")
    context = Context(bench.exchange, str(bench.root))
    context.cancelled.set()
    inputs = {
        "samples": [bench.samples(RESPONSES)],
        "rows": [bench.exchange.put("rows", json.dumps(ROWS).encode())],
    }
    with pytest.raises(Cancelled):
        list(bench.function.call(Call("c", "score", inputs, {"policy": POLICY}, {"score": f"{name}:f"}), context))
    assert not (bench.root / "reward.py.count").exists()


# --- remote ----------------------------------------------------------------------------------------------------------


class Remote:
    def __init__(self) -> None:
        self.queries: list[dict[str, Any]] = []
        self.answer: tuple[int, bytes] = (200, b"{}")
        self.traceparents: list[str | None] = []
        remote = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                remote.queries.append(json.loads(self.rfile.read(length)))
                remote.traceparents.append(self.headers["traceparent"])
                self.send_response(remote.answer[0])
                self.end_headers()
                self.wfile.write(remote.answer[1])

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/get_reward"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def remote() -> Iterator[Remote]:
    served = Remote()
    yield served
    served.close()


def test_remote_scorer_in_openrlhf_form(bench: Bench, remote: Remote) -> None:
    remote.answer = (200, json.dumps({
        "rewards": [1, 0.5, -1, 2], "scores": [1, 0, 0, 1], "extra_logs": {"length": [1, 2, 3, 4]},
    }).encode())  # fmt: skip
    scores, _, _ = bench.score(RESPONSES, remote.url)
    assert scores["score"] == {(0, 0): 1.0, (0, 1): 0.5, (1, 0): -1.0, (1, 1): 2.0}
    assert scores["acc"][1, 0] == 0.0
    assert scores["length"][1, 1] == 4.0
    assert remote.traceparents == [f"00-{TRACE}-{bench.spans['score']}-01"], "its own spans can go under ours"
    [query] = remote.queries
    assert query == {
        "query": ["0?4<end>", "0?5<end>", "1?9<end>", "1? 9 <end>"],
        "prompts": ["0?", "0?", "1?", "1?"],
        "labels": ["4", "4", "9", "9"],
    }


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (500, b"oh\nno", RetryableError, r"answered 500: oh no"),
        (429, b"slow down", RetryableError, r"answered 429"),
        (404, b"", FatalError, r"answered 404"),
        (200, b"<html>", FatalError, r"answered no JSON: b'<html>'"),
        (200, b"{}", FatalError, r"answered NoneType as 'rewards' for 4 samples"),
        (200, b'{"rewards": [1, 2]}', FatalError, r"answered 2 values as 'rewards' for 4 samples"),
        (200, b'{"rewards": [1, 2, null, 1]}', FatalError, r"returned None for sample \(group 1, index 0\)"),
    ],
)
def test_remote_failures(
    bench: Bench, remote: Remote, status: int, body: bytes, error: type[Exception], message: str
) -> None:
    remote.answer = (status, body)
    with pytest.raises(error, match=message):
        bench.score(RESPONSES, remote.url)


def test_a_remote_that_is_away_is_retryable(bench: Bench, remote: Remote) -> None:
    remote.server.server_close()
    with pytest.raises(RetryableError, match=r"does not answer"):
        bench.score(RESPONSES, remote.url)


def test_several_rewards_make_one_score_by_their_weights(bench: Bench) -> None:
    name = bench.file(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 9, 'right': float(solution_str == ground_truth), 'short': 0.5}\n"
    )
    scores, _, _ = bench.score(RESPONSES, f"{name}:compute_score", weights={"right": 2.0, "short": -1.0})
    assert scores["score"] == {(0, 0): 1.5, (0, 1): -0.5, (1, 0): 1.5, (1, 1): -0.5}
    with pytest.raises(FatalError, match=r"reward.weights names 'form', the scorer gave score, right, short for"):
        bench.score(RESPONSES, f"{name}:compute_score", weights={"form": 1.0})


def test_several_scorers_are_numbers_by_their_names(bench: Bench) -> None:
    file = bench.file(
        "def brief(completions, **columns):\n    return [{'score': -len(text), 'acc': 9} for text in completions]\n"
    )
    scorers = {"number": "rule:number", "brief": f"{file}:brief"}
    scores, done, _ = bench.score(RESPONSES, "", scorers=scorers, weights={"number": 2.0, "brief": 0.5})
    assert scores["number"] == {(0, 0): 1, (0, 1): 0, (1, 0): 1, (1, 1): 1}
    assert scores["brief"] == {(0, 0): -1, (0, 1): -1, (1, 0): -1, (1, 1): -3}
    assert scores["score"] == {(0, 0): 1.5, (0, 1): -0.5, (1, 0): 1.5, (1, 1): 0.5}
    assert set(scores["acc"].values()) == {9}, "what a scorer gives besides, under its own name"
    assert json.loads(bench.exchange.get(Ref.from_json(done["texts"])).splitlines()[0])["pred"] == "4"
    file = bench.file("def brief(completions, **columns):\n    return [1.0, None, 1.0, 1.0]\n")
    with pytest.raises(FatalError, match=r"brief returned None for sample \(group 0, index 1\)"):
        bench.score(RESPONSES, "", scorers=scorers, weights={"number": 2.0, "brief": 0.5})
    with pytest.raises(FatalError, match="wants score, or scorers and weights"):
        bench.score(RESPONSES, "rule:number", scorers=scorers, weights={"number": 1.0})
