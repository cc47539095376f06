"""The tiny job with an environment: what it adds to a job's directory, and what a job's settings then are."""

from __future__ import annotations

from tests.support.tiny_job import Job

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
ENVIRONMENT = '''
import os
import random
import time


class Game:
    """Answers each turn with the number of its digits; told turns and a number of its own are its state."""

    def reset(self, ground_truth, seed):
        self.wanted, self.turns, self.dice = ground_truth, 0, random.Random(seed)

    def step(self, text):
        self.turns += 1
        if log := os.environ.get("ENVIRONMENT_LOG"):
            with open(log, "a") as file:
                file.write(f"{self.turns} {text}\\n")
        time.sleep(float(os.environ.get("ENVIRONMENT_S", "0")))
        over = text.count(self.wanted) > 2
        return f"{len(text)}+{self.dice.randint(0, 9)}", text.count(self.wanted) / (1 + len(text)), over
'''
HARNESS = '''
import os

from openai import OpenAI


class Agent:
    """Asks by OpenAI's client, as any harness does; its answers are told in a file."""

    def reset(self, ground_truth, row):
        self.wanted, self.prompt, self.texts = ground_truth, row["prompt"], []

    def run(self, base_url):
        client = OpenAI(base_url=base_url, api_key="none")
        messages = [{"role": "user", "content": f"{self.prompt}"}]
        for turn in range(2):
            said = client.chat.completions.create(model="any", messages=messages).choices[0]
            if said.finish_reason != "stop":
                break
            self.texts.append(said.message.content)
            if log := os.environ.get("ENVIRONMENT_LOG"):
                with open(log, "a") as file:
                    file.write(f"{turn} {said.message.content}\\n")
            messages += [said.message.model_dump(exclude_none=True), {"role": "user", "content": f"{turn}+1"}]

    def get_reward(self):
        return sum(text.count(self.wanted) / (1 + len(text)) for text in self.texts)
'''
SETTINGS = ["environment.kind=environment.py:Game", "environment.max_turns=3", "reward.score=environment",
            "rollout.max_response_length=24"]  # fmt: skip


def add_environment(job: Job) -> None:
    """What a job in the same directory needs for SETTINGS; without them it is what it was."""
    (job.directory / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (job.directory / "environment.py").write_text(ENVIRONMENT)
    (job.directory / "agent.py").write_text(HARNESS)
