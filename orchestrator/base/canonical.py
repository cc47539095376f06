"""JSON of which checksums can be made."""

import json
from typing import Any


def canonical(value: Any) -> bytes:
    """JSON with sorted keys; the same value gives the same bytes. Non-finite numbers are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
