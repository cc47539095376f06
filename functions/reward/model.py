"""A reward model: transformers' sequence classifier with one label, its score read at the last token of a sample."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from functions.models.pretrained import backbone, score_head
from functions.models.team import Member, Team
from functions.reward.scorer import Failed, Item, Scored, checked


@dataclass(frozen=True)
class RewardModel:
    """`tokenizer` is the model's own where it is not the policy's: the text is then encoded anew, as it stands (special
    tokens by their names)."""

    name: str
    team: Team
    tokenizer: Tokenizer | None
    micro_batch_tokens: int
    tick: Callable[[], None]

    def score(self, items: Sequence[Item]) -> list[Scored | Failed]:
        rows = [self._tokens(item) for item in items]
        scores = np.zeros(len(items))
        for batch in token_batches([len(row) for row in rows], self.micro_batch_tokens):
            self.tick()
            scores[batch] = self.team(_scores, [rows[i] for i in batch])
        return [checked(float(score), self.name, item) for score, item in zip(scores, items, strict=True)]

    def _tokens(self, item: Item) -> npt.NDArray[np.int32]:
        if self.tokenizer is None:
            return np.concatenate((item.prompt_tokens, item.response_tokens))
        return np.array(self.tokenizer.encode(item.text, add_special_tokens=False).ids, np.int32)


def hold(member: Member, directory: Path, dtype: torch.dtype) -> None:
    """Loads the reward model of `directory`. ValueError where there is none."""
    member.held = {}
    member.held["model"] = member.load("reward", directory, dtype)


@torch.no_grad()
def _scores(member: Member, rows: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float64]:
    model, device = member.held["model"], member.device
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)  # [B, T], padded at the right
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
    mask = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
    states = backbone(model)(input_ids=tokens.to(device), attention_mask=mask.to(device)).last_hidden_state
    last = states[torch.arange(len(rows), device=device), (lengths - 1).to(device)]  # [B, H]
    scores: npt.NDArray[np.float64] = score_head(model)(last).squeeze(-1).double().cpu().numpy()
    return scores


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Rows grouped, longest first, so that no group holds more than `budget` tokens with its padding (one row may)."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
