"""Events of a run to any number of followers, as server-sent events: one reader of the file, however many listen."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial

from orchestrator.api.jobs import Jobs
from orchestrator.api.problems import ApiError
from orchestrator.api.redact import redacted
from orchestrator.base.background import guarded
from orchestrator.base.errors import RunError
from orchestrator.run.events import FILE, RunEvent, read_events

LOOK_EVERY_S = 0.2
COMMENT_EVERY_S = 15.0
"""A line goes out at least so often, so that proxies keep the connection and a follower that is gone is noticed."""

log = logging.getLogger(__name__)


def frame(event: RunEvent) -> bytes:
    """One server-sent event: https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    value = {"id": event.id, "time": event.time, "type": event.type, "data": event.data}
    return f"id: {event.id}\nevent: {event.type}\ndata: {redacted(json.dumps(value))}\n\n".encode()


@dataclass
class _Feed:
    frames: list[bytes] = field(default_factory=list)
    over: bool = False
    """No event will follow, unless somebody asks for it."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """What the file held when the first follower came is read."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and replaced whenever something above has changed."""
    followers: int = 0
    reader: asyncio.Task[None] | None = None


class Feeds:
    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._feeds: dict[str, _Feed] = {}

    async def follow(self, job: str, after: int) -> AsyncGenerator[bytes, None]:
        """Frames of the events with ids above `after` (of all, where there is none such), until the run is over."""
        feed = self._feeds.setdefault(job, _Feed())
        feed.followers += 1
        try:
            if feed.reader is None:
                feed.reader = guarded(f"the feed of {job}", partial(self._read, job, feed), partial(self._failed, feed))
            await feed.ready.wait()
            sent = after if after <= len(feed.frames) else 0
            while True:
                news = feed.news
                if sent < len(feed.frames):
                    batch = feed.frames[sent:]
                    sent += len(batch)
                    yield b"".join(batch)
                elif feed.over:
                    return
                else:
                    try:
                        async with asyncio.timeout(COMMENT_EVERY_S):
                            await news.wait()
                    except TimeoutError:
                        yield b": still here\n\n"
        finally:
            feed.followers -= 1
            if feed.followers == 0:
                if feed.reader is not None:
                    feed.reader.cancel()
                self._feeds.pop(job, None)

    async def _read(self, job: str, feed: _Feed) -> None:
        path, offset = self._jobs.directory(job) / FILE, 0
        while True:
            over = await asyncio.to_thread(self._over, job)  # before the file is read: nothing comes after it
            try:
                events, offset = await asyncio.to_thread(read_events, path, start=offset)
            except RunError as error:
                log.error("%s", error)
                events, over = [], True
            feed.frames += map(frame, events)
            if events or over != feed.over:
                feed.over = over
                feed.news.set()
                feed.news = asyncio.Event()
            feed.ready.set()
            await asyncio.sleep(LOOK_EVERY_S)

    def _failed(self, feed: _Feed, message: str) -> None:
        """Nothing will follow: whoever does is told so, instead of waiting for ever."""
        log.error("%s", message)
        feed.over = True
        feed.ready.set()
        feed.news.set()
        feed.news = asyncio.Event()

    def _over(self, job: str) -> bool:
        """Nothing will happen any more, unless somebody asks; also where the job was deleted."""
        try:
            return self._jobs.get(job).settled
        except (ApiError, RunError):
            return True
