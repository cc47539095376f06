"""Every policy loss by one call, whatever it wants besides the tensors that all have."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from functions.algorithms.policy_losses import POLICY_LOSSES

LOSSES = [name for name in POLICY_LOSSES if name != "forward_kl_topk"]
"""Those of the sampled tokens' log-probabilities."""


def call_loss(name: str, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """`chosen`, where the loss wants it and the inputs do not say: every other token."""
    function = POLICY_LOSSES[name]
    takes = inspect.signature(function).parameters
    if "chosen" not in takes:
        inputs.pop("chosen", None)
    elif "chosen" not in inputs:
        inputs["chosen"] = inputs["old_logprobs"].new_zeros(inputs["old_logprobs"].shape).bool()
        inputs["chosen"][::2] = True
    return function(**inputs)
