"""Names that both sides of a call choose by."""

from typing import Literal

Engine = Literal["auto", "torch", "transformers", "vllm"]
"""What samples tokens (functions/generate/engines.py)."""
REPLAYED = ("qwen3_moe",)
"""model_type of architectures whose routing can be replayed (functions/models/router_replay.py)."""
