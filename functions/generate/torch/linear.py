"""Projections with weights packed once for the CPU's matrix kernel.

torch's fp32 `linear` on a CPU repacks the weight in every call (MKL); oneDNN takes weights packed beforehand, which on
the small models of CPU runs is worth a quarter to a half of the time of a projection (bench/rollout.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ROWS = 64
"""Rows for which oneDNN chooses the packing; other counts work with it too."""


class Linear:
    """y = x W^T + b for x [M, in]; W [out, in], b [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.packed = weight.device.type == "cpu" and torch._C._has_mkldnn and _packs(weight.dtype)
        self.pack()

    def pack(self) -> None:
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), PACKED_ROWS)

    def unpack(self) -> None:
        """The weight as it was given, bit for bit; `pack` before the next product."""
        if self.packed:
            self.weight = self.weight.to_dense()

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


def _packs(dtype: torch.dtype) -> bool:
    """Half precision by CPUs with AVX-512 or AVX-NE-CONVERT alone; of others a product raises."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
