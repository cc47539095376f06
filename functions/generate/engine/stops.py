"""Where a response ends besides the model's own end: stop token ids and stop strings.

A stop string ends the response with the token in which it is complete; the response keeps it (as vLLM with
include_stop_str_in_output), since every sampled token is trained on. The text is that of the response's last tokens:
as many as the longest string has bytes, for no token is shorter than one.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from functions.generate.engine.base import Sampling


class Stops:
    """Of one call: the model's own `eos`, and what its sampling says."""

    def __init__(self, eos: npt.NDArray[np.int64], sampling: Sampling, tokenizer: Tokenizer | None) -> None:
        own = np.zeros(0, np.int64) if sampling.ignore_eos else eos
        self.ids = np.union1d(own, np.array(sampling.stop_token_ids, np.int64))
        self._strings, self._tokenizer = sampling.stop, tokenizer
        self._tail = max((len(s.encode()) for s in sampling.stop), default=0) + 1
        if self._strings and tokenizer is None:
            raise ValueError("stop: the model has no tokenizer.json to find strings with; set stop_token_ids")

    def __bool__(self) -> bool:
        """Whether there are strings to look for."""
        return bool(self._strings)

    def in_text(self, response: Sequence[int] | npt.NDArray[np.int32]) -> bool:
        """Whether a stop string is in the text that the response ends with."""
        assert self._tokenizer is not None
        tail = [int(token) for token in response[-self._tail :]]
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return any(string in text for string in self._strings)


def tokenizer_of(model_dir: Path) -> Tokenizer | None:
    """None where the directory has no tokenizer.json."""
    file = model_dir / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None
