"""Names that both sides of a call choose by."""

from typing import Literal

Engine = Literal["auto", "torch", "transformers", "vllm"]
"""What samples tokens (functions/generate/engines.py)."""
