"""What a train call says about itself while it works."""

from typing import Any

from functions.call.function import Context


class Progress:
    """The heartbeat's data and the place where a cancelled call ends: called before each pack."""

    def __init__(self, context: Context) -> None:
        self._context, self._data = context, dict[str, Any]()

    def stage(self, name: str, packs: int) -> None:
        self._data = {"stage": name, "of": packs}

    def __call__(self, number: int) -> None:
        self._context.check()
        self._context.progress(self._data | {"packs": number})
