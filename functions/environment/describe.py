"""Which tools environments have, told by a process of its own.

    python -m functions.environment.describe '{"NAME": "KIND", ...}'

Its last line of output is JSON: {"tools": {NAME: [schema, ...]}, "ask": [NAME of those that make their prompts]},
or {"error": one line}.
"""

import json
import sys
from typing import Any

from functions.call import userfile
from functions.call.function import FatalError
from functions.environment.kinds import open_kind


def described(kinds: dict[str, str]) -> dict[str, Any]:
    try:
        opened = {name: open_kind(kind) for name, kind in kinds.items()}
        tools = {name: list(kind.tools) for name, kind in opened.items()}
        return {"tools": tools, "ask": [name for name, kind in opened.items() if kind.asks]}
    except FatalError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": userfile.describe(error)}


if __name__ == "__main__":
    print("\n" + json.dumps(described(json.loads(sys.argv[1]))))
