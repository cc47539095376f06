"""Keys and values of one sample as they travel: from the engine that was cut to the one that goes on with it.

    tensor   [kv heads, layers, 2 (keys, values), tokens, head dim], keys after the rotary embedding
             tokens = prompt + response - 1: the last token's are computed when the next one is sampled

Heads come first, so that the part of a tensor-parallel rank is one contiguous slice. RLHFuse (arXiv:2409.13221, section
4.2) moves them over the network as well; here they pass through the exchange, like everything between stages.

In the exchange a sample's are one or more objects of at most PART_BYTES, for a store may limit a value (Redis: 512 MB)
and several travel side by side. Each is a safetensors file of one tensor `rows` [(head, layer) pairs, 2, tokens, head
dim] that says in its metadata whose it is and which of the pairs it holds:

    {"version": "3", "group": "7", "index": "0", "heads": "4", "layers": "28", "first": "56", "form": "halves"}
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from functions.base.wire import WireError
from functions.exchange.base import Buffer

PART_BYTES = 128 << 20
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TENSOR = "rows"
Form = Literal["halves", "scaled pairs"]
"""How a key is written. halves: as transformers and vLLM have it, element i rotated with i + D/2. scaled pairs: as the
torch engine has it (llama.py), those two adjacent, and times the square root of the attention scale."""
_FORMS: tuple[Form, ...] = ("halves", "scaled pairs")
_NUMBERS = ("version", "group", "index", "heads", "layers", "first")


@dataclass(frozen=True)
class Layout:
    """What keys and values must be like for an engine to go on with them. `heads` are all of the model's kv heads,
    however many replicas or ranks they are divided over."""

    heads: int
    layers: int
    width: int
    """head dim"""
    dtype: torch.dtype
    form: Form = "halves"

    @property
    def token_bytes(self) -> int:
        return self.heads * self.layers * 2 * self.width * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads} kv heads x {self.layers} layers x {self.width} in {dtype}, {self.form}"


@dataclass(frozen=True, eq=False)
class KeysValues:
    """See the head of this module; `tensor` may lie on any device."""

    tensor: Tensor
    form: Form = "halves"

    @property
    def tokens(self) -> int:
        return self.tensor.shape[3]

    @property
    def layout(self) -> Layout:
        heads, layers, _, _, width = self.tensor.shape
        return Layout(heads, layers, width, self.tensor.dtype, self.form)


@dataclass(frozen=True, eq=False)
class CachePart:
    """One object, decoded: `rows` of the sample's (head, layer) pairs, from pair `first` on."""

    version: int
    group: int
    index: int
    heads: int
    layers: int
    first: int
    form: Form
    rows: Tensor
    """[pairs, 2, tokens, head dim]"""


def encode(
    cache: KeysValues, *, version: int, group: int, index: int, part_bytes: int = PART_BYTES
) -> Iterator[list[Buffer]]:
    """The sample's objects, in order, of at most `part_bytes` each, or one pair; each as buffers whose concatenation is
    one object, without a copy where the tensor is contiguous and in the CPU's memory."""
    heads, layers, _, tokens, width = cache.tensor.shape
    rows = cache.tensor.detach().cpu().contiguous().view(heads * layers, 2, tokens, width)
    each = max(1, part_bytes // max(1, rows[0].nbytes))
    for first in range(0, len(rows), each):
        part = rows[first : first + each]
        numbers = {"version": version, "group": group, "index": index, "heads": heads, "layers": layers, "first": first}
        metadata = {name: str(value) for name, value in numbers.items()} | {"form": cache.form}
        header: dict[str, object] = {"__metadata__": metadata}
        header[_TENSOR] = {"dtype": _NAMES[part.dtype], "shape": list(part.shape), "data_offsets": [0, part.nbytes]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield [len(text).to_bytes(8, "little") + text, part.reshape(-1).view(torch.uint8).numpy().data]


def decode(data: bytes) -> CachePart:
    """The object, as a view of `data`: its tensor must not be written to. Raises WireError for anything else. From one
    thread at a time (it silences a warning)."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        entry, metadata = header[_TENSOR], header["__metadata__"]
        numbers = {name: int(metadata[name]) for name in _NUMBERS}
        form = _FORMS[_FORMS.index(metadata["form"])]
        dtype, shape = _DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"not encoded keys and values: {error!r}") from error
    pairs = numbers["heads"] * numbers["layers"]
    fits = len(shape) == 4 and shape[1] == 2 and min(shape) > 0 and 0 <= numbers["first"] <= pairs - shape[0]
    if not fits or len(data) - begin != torch.Size(shape).numel() * dtype.itemsize:
        raise WireError(f"keys and values of {numbers}: {shape} {entry['dtype']} in {len(data) - begin} bytes")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        rows = torch.frombuffer(data, dtype=dtype, offset=begin)
    return CachePart(rows=rows.view(shape), form=form, **numbers)


def join(parts: Sequence[CachePart]) -> KeysValues:
    """One sample's keys and values from all of its parts, in any order. Raises WireError where some are missing, or
    belong to something else."""
    parts = sorted(parts, key=lambda part: part.first)
    whole = parts[0]
    who = f"keys and values of sample (group {whole.group}, index {whole.index})"
    at = 0
    for part in parts:
        if _identity(part) != _identity(whole):
            raise WireError(f"{who}: one part is of {_identity(part)}, another of {_identity(whole)}")
        if part.first != at:
            raise WireError(f"{who}: rows {min(at, part.first)} to {max(at, part.first)} are missing or given twice")
        at += len(part.rows)
    if at != whole.heads * whole.layers:
        raise WireError(f"{who}: {at} of {whole.heads * whole.layers} rows, a part is missing")
    rows = whole.rows if len(parts) == 1 else torch.cat([part.rows for part in parts])
    return KeysValues(rows.view(whole.heads, whole.layers, *rows.shape[1:]), whole.form)


def _identity(part: CachePart) -> Mapping[str, object]:
    numbers = {name: getattr(part, name) for name in _NUMBERS if name != "first"}
    return numbers | {"form": part.form, "shape": tuple(part.rows.shape[1:]), "dtype": _NAMES[part.rows.dtype]}
