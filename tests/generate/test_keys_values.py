"""Keys and values as bytes: what is written comes back, in parts too; what is not whole is refused with a reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load

from functions.base.wire import WireError
from functions.exchange.base import Buffer
from functions.generate.engine.keys_values import KeysValues, decode, encode, join


def made(dtype: torch.dtype = torch.float32) -> KeysValues:
    torch.manual_seed(0)
    return KeysValues(torch.randn(3, 2, 2, 5, 4).to(dtype), "scaled pairs")


def written(cache: KeysValues, part_bytes: int = 1 << 20) -> list[bytes]:
    return [b"".join(buffers) for buffers in encode(cache, version=3, group=7, index=1, part_bytes=part_bytes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part_bytes", [1, 400, 1 << 20])
def test_every_bit_comes_back_from_parts_in_any_order(dtype: torch.dtype, part_bytes: int) -> None:
    cache = made(dtype)
    blobs = written(cache, part_bytes)
    assert len(blobs) == {1: 6, 400: {4: 3, 2: 2}[dtype.itemsize], 1 << 20: 1}[part_bytes]
    parts = [decode(blob) for blob in reversed(blobs)]
    assert {(part.version, part.group, part.index) for part in parts} == {(3, 7, 1)}
    back = join(parts)
    assert torch.equal(back.tensor, cache.tensor)
    assert back.layout == cache.layout
    assert back.tokens == 5


def test_a_strided_tensor_is_written_as_its_values() -> None:
    strided = KeysValues(torch.randn(5, 2, 3, 2, 4).permute(2, 1, 3, 0, 4))
    assert torch.equal(join([decode(blob) for blob in written(strided)]).tensor, strided.tensor)


def test_an_object_is_a_safetensors_file() -> None:
    (blob,) = written(made())
    assert torch.equal(load(blob)["rows"], made().tensor.flatten(0, 1))


def test_writing_copies_nothing() -> None:
    cache = made()
    ((_, body),) = encode(cache, version=3, group=7, index=1)
    before: Buffer = bytes(body)
    cache.tensor.add_(1)
    assert bytes(body) != before


def test_what_is_not_whole_is_refused() -> None:
    blobs = written(made(), 400)
    parts = [decode(blob) for blob in blobs]
    with pytest.raises(WireError, match=r"sample \(group 7, index 1\): 4 of 6 rows, a part is missing"):
        join(parts[:-1])
    with pytest.raises(WireError, match="rows 2 to 4 are missing or given twice"):
        join([parts[0], parts[2]])
    with pytest.raises(WireError, match="rows 0 to 2 are missing or given twice"):
        join([parts[0], *parts])
    (other,) = [b"".join(b) for b in encode(KeysValues(torch.zeros(1, 2, 2, 5, 4)), version=4, group=7, index=1)]
    with pytest.raises(WireError, match="one part is of"):
        join([parts[0], decode(other)])
    for broken in (b"", b"not a safetensors file", blobs[0][:-1], blobs[0] + b"0"):
        with pytest.raises(WireError, match="keys and values"):
            decode(broken)
    size = int.from_bytes(blobs[0][:8], "little")
    header = json.loads(blobs[0][8 : 8 + size])
    for change in ({"first": "6"}, {"form": "thirds"}, {"layers": "x"}):
        text = json.dumps(header | {"__metadata__": header["__metadata__"] | change}).encode()
        with pytest.raises(WireError, match="keys and values"):
            decode(len(text).to_bytes(8, "little") + text + blobs[0][8 + size :])
