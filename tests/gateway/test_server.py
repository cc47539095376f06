"""The gateway as its clients find it: OpenAI's own client, over real replicas, beside transformers as the reference."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.api.auth import Tokens
from orchestrator.api.gateway.app import create
from orchestrator.api.gateway.start import Options, opened
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
MODEL, TOKEN = EXAMPLE / "model", "a-token-of-the-tests"


@dataclass
class Server:
    url: str

    def client(self, token: str = TOKEN) -> Any:
        import openai  # a second, which only the worker of these tests has to pay

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=120)

    def post(self, path: str, body: Any, token: str = TOKEN) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers={"authorization": f"Bearer {token}"}, timeout=120)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of 16 slots, cut as often as may be."""
    tokens = tmp_path_factory.mktemp("gateway") / "tokens"
    tokens.write_text(f"tests write {TOKEN}\nother read {TOKEN}-to-read\n")
    found: dict[str, Any] = {}

    async def run() -> None:
        options = Options(str(MODEL), name="arithmetic", replicas=2, slots=16, slice_s=0.02)
        async with opened(options) as served:
            app = create(served, Tokens(tokens), loopback=True)
            config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=1)
            made = uvicorn.Server(config)
            task = asyncio.create_task(made.serve())
            while not made.started:
                await asyncio.sleep(0.01)
            port = made.servers[0].sockets[0].getsockname()[1]
            found.update(server=made, url=f"http://127.0.0.1:{port}", gateway=served.gateway)
            await task

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    until(lambda: found or not thread.is_alive())
    try:
        yield Server(found["url"])
    finally:
        found["server"].should_exit = True
        thread.join()


def questions() -> list[str]:
    rows = [json.loads(line) for line in (EXAMPLE / "validation.jsonl").read_text().splitlines()]
    return [row["prompt"][0]["content"] for row in rows]


@pytest.fixture(scope="module")
def greedy() -> dict[str, list[int]]:
    """What transformers answers, token by token, <|end|> included."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    asked = questions()[:200]
    batch: Any = tokenizer.apply_chat_template(
        [[{"role": "user", "content": q}] for q in asked], add_generation_prompt=True, padding=True,
        return_tensors="pt", return_dict=True,
    )  # fmt: skip
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=24, do_sample=False)[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    return {q: row[: row.index(end) + 1] if end in row else row for q, row in zip(asked, out, strict=True)}


def text_of(tokens: list[int]) -> str:
    return str(AutoTokenizer.from_pretrained(MODEL).decode(tokens, skip_special_tokens=True))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_many_streams_lose_and_mix_nothing(server: Server, greedy: dict[str, list[int]], count: int) -> None:
    asked_of = dict(list(greedy.items())[:count])

    async def one(client: Any, asked: str) -> tuple[str, list[int], int, str | None]:
        text, ids, chunks, finish = "", list[int](), 0, None
        stream = await client.chat.completions.create(
            model="arithmetic", messages=user(asked), temperature=0, max_tokens=24, stream=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        async for chunk in stream:
            [choice] = chunk.choices
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            chunks += 1
            finish = choice.finish_reason or finish
        return text, ids, chunks, finish

    import openai

    async def every() -> list[tuple[str, list[int], int, str | None]]:
        http: Any = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=250)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0, timeout=250, http_client=http
        ) as client:
            return await asyncio.gather(*(one(client, asked) for asked in asked_of))

    answers = asyncio.run(every())
    assert len(answers) == count == len(asked_of)
    for (asked, wanted), (text, ids, _, finish) in zip(asked_of.items(), answers, strict=True):
        assert ids == wanted, asked
        assert text == text_of(wanted), asked
        assert finish == ("stop" if wanted[-1] == 256 else "length")
    if count == 200:  # many slices
        assert max(chunks for _, _, chunks, _ in answers) > 2, (
            "some have come in pieces: more than the role and all of it"
        )


def test_a_whole_answer_with_log_probabilities(server: Server, greedy: dict[str, list[int]]) -> None:
    asked, wanted = next(iter(greedy.items()))
    answer = server.client().chat.completions.create(
        model="arithmetic", messages=user(asked), temperature=0, max_tokens=24, logprobs=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    [choice] = answer.choices
    assert choice.message.content == text_of(wanted)
    assert choice.token_ids == wanted
    prompt = answer.prompt_token_ids
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(wanted))
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(MODEL)(torch.tensor([prompt + wanted])).logits[0]
    reference = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(-1, torch.tensor(wanted)[:, None])[:, 0]
    got = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    torch.testing.assert_close(got, reference, atol=1e-4, rtol=0)
    assert "".join(entry.token for entry in choice.logprobs.content[:-1]) == choice.message.content


def test_tokens_in_tokens_out_is_the_same_answer(server: Server, greedy: dict[str, list[int]]) -> None:
    """As vLLM's /inference/v1/generate, which verifiers' train client calls."""
    asked, wanted = next(iter(greedy.items()))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    encoded: Any = tokenizer.apply_chat_template(user(asked), add_generation_prompt=True, return_dict=True)
    prompt = encoded["input_ids"]
    params = {"temperature": 0.0, "max_tokens": 24, "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "arithmetic", "token_ids": prompt, "sampling_params": params, "stream": False}
    answer = server.post("/inference/v1/generate", body).json()
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (wanted, "stop")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in wanted]
    stopped = server.post(
        "/inference/v1/generate", body | {"sampling_params": params | {"stop_token_ids": [wanted[3]]}}
    )
    [choice] = stopped.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (wanted[: wanted.index(wanted[3]) + 1], "stop")


def test_completions_stop_words_and_seeds(server: Server) -> None:
    client, seeded = (
        server.client(),
        {"model": "arithmetic", "prompt": "<|user|>8+9+7+9=?<|assistant|>", "max_tokens": 12},
    )
    first = client.completions.create(**seeded, n=3, seed=7, logprobs=0)
    again = client.completions.create(**seeded, n=3, seed=7, logprobs=0)
    assert [c.text for c in first.choices] == [c.text for c in again.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    other = {tuple(c.text for c in client.completions.create(**seeded, n=3, seed=s).choices) for s in range(8)}
    assert len(other) > 1
    both = client.completions.create(**{**seeded, "prompt": [seeded["prompt"]] * 2}, temperature=0)
    assert both.choices[0].text == both.choices[1].text
    whole = both.choices[0].text
    assert " " in whole
    for stream in (False, True):
        stopped = client.completions.create(**seeded, temperature=0, stop=[" "], stream=stream)
        choices = [c for part in stopped for c in part.choices] if stream else stopped.choices
        assert "".join(c.text for c in choices) == whole.partition(" ")[0]
        assert choices[-1].finish_reason == "stop"


def test_a_client_that_goes_leaves_the_others_their_place(server: Server, greedy: dict[str, list[int]]) -> None:
    asked, wanted = next(iter(greedy.items()))
    with server.client().completions.create(
        model="arithmetic", prompt="<|user|>1+1=?<|assistant|>", max_tokens=40, stream=True,
        extra_body={"ignore_eos": True}, n=16,
    ) as stream:  # fmt: skip
        next(iter(stream))
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda _: server.client().chat.completions.create(
            model="arithmetic", messages=user(asked), temperature=0, max_tokens=24), range(8))  # fmt: skip
        assert {answer.choices[0].message.content for answer in answers} == {text_of(wanted)}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "messages: wants a list"),
        ("/v1/chat/completions", {"messages": user("1"), "max_tokens": 0}, 400, "max_tokens: got 0"),
        ("/v1/chat/completions", {"messages": user("1"), "max_tokens": 63}, 400, "the model's context is 64"),
        ("/v1/chat/completions", {"messages": user("1" * 99)}, 400, "the model's context is 64"),
        ("/v1/chat/completions", {"messages": user("1"), "temprature": 1}, 400, "did you mean 'temperature'"),
        ("/v1/chat/completions", {"messages": user("1"), "temperature": "hot"}, 400, "temperature: got 'hot'"),
        ("/v1/chat/completions", {"messages": user("1"), "presence_penalty": 1}, 400, "presence_penalty: got 1"),
        ("/v1/chat/completions", {"messages": user("1"), "logprobs": True, "top_logprobs": 5}, 400, "top_logprobs"),
        ("/v1/chat/completions", {"messages": user("1"), "n": 1000}, 400, "n: got 1000, wants a number from 1 to 128"),
        ("/v1/chat/completions", {"messages": user("1"), "model": "gpt"}, 404, "'gpt' is not served here: arithmetic"),
        ("/v1/completions", {}, 400, "prompt: wants"),
        ("/v1/completions", {"prompt": [1, 999]}, 400, "token ids from 0 to 259"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, 400, "token_ids: wants"),
        ("/v1/completions", [1], 400, "wants a JSON object"),
    ],
)  # fmt: skip
def test_bad_requests_are_named_in_one_line(server: Server, path: str, body: Any, status: int, said: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert said in message
    assert "\n" not in message


def test_nobody_without_a_token_nor_another_site(server: Server) -> None:
    import openai

    body = {"prompt": "1", "max_tokens": 1}
    assert server.post("/v1/completions", body, token="wrong-token-of-them").status_code == 401
    assert server.post("/v1/completions", body, token=f"{TOKEN}-to-read").status_code == 403
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong-token-of-them").models.list()
    assert [model.id for model in server.client().models.list()] == ["arithmetic"]
    headers = {"authorization": f"Bearer {TOKEN}", "origin": "http://evil.example"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
