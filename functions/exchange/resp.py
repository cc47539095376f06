"""A conversation with Redis: commands sent together, an answer to each read. redis-py packs, hiredis parses.

redis-py packs with hiredis where that is installed, which copies every value: a 16 MB SET takes four times as long as
by redis-py's packer in Python, so that one is asked for (docs/decisions/0015-libraries.md).
"""

from collections.abc import Iterable, Iterator
from typing import Any

from redis._parsers import Encoder
from redis.connection import PythonRespSerializer
from redis.exceptions import ResponseError

PIECE_BYTES = 1 << 20
"""Sent at once: the socket's timeout is for so much."""

Reply = Any
Replies = list[Reply]
Command = tuple[Any, ...]


class Concatenation:
    """Byte views that are one argument, longer than what is joined with its neighbours; they are not copied."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views, self._size_bytes = views, sum(view.nbytes for view in views)

    def __len__(self) -> int:
        return self._size_bytes

    def pieces(self) -> Iterator[memoryview]:
        for view in self._views:
            for at in range(0, view.nbytes, PIECE_BYTES):
                yield view[at : at + PIECE_BYTES]


_encoder = Encoder("utf-8", "strict", False)  # type: ignore[no-untyped-call]


def _encode(part: Any) -> Any:
    return part if isinstance(part, Concatenation) else _encoder.encode(part)  # type: ignore[no-untyped-call]


PACKER = PythonRespSerializer(6000, _encode)
"""What connections have to be made with."""


def converse(connection: Any, commands: Iterable[Command]) -> Replies:
    """Sends all, then reads an answer to each (also where one is an error: the first is raised at the end)."""
    commands = list(commands)
    connection.send_packed_command(_pieces(connection.pack_commands(commands)))
    replies: Replies = []
    failure: ResponseError | None = None
    for _ in commands:
        try:
            replies.append(connection.read_response())
        except ResponseError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    for reply in replies:
        if isinstance(reply, list) and (errors := [r for r in reply if isinstance(r, ResponseError)]):
            raise errors[0]
    return replies


def _pieces(chunks: Iterable[bytes | memoryview | Concatenation]) -> Iterator[bytes | memoryview]:
    for chunk in chunks:
        if isinstance(chunk, Concatenation):
            yield from chunk.pieces()
        else:
            yield chunk
