"""Which tools environments have, told by a process of its own.

    python -m functions.environment.describe '{"NAME": "KIND", ...}'

Its last line of output is JSON: {"tools": {NAME: [schema, ...]}}, or {"error": one line}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from functions.call import userfile
from functions.call.function import FatalError
from functions.environment.kinds import open_kind


def described(kinds: dict[str, str]) -> dict[str, Any]:
    try:
        return {"tools": {name: list(open_kind(kind).tools) for name, kind in kinds.items()}}
    except FatalError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": userfile.describe(error)}


if __name__ == "__main__":
    print("\n" + json.dumps(described(json.loads(sys.argv[1]))))
