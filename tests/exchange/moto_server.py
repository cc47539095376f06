"""moto's S3 server, one operation on an object at a time: `python moto_server.py -H HOST -p PORT`.

moto looks whether an object is there, writes it and gives it its metadata in steps that other requests see between.
A conditional put could so be won twice, which no real store allows (Amazon S3 User Guide, "Conditional writes").
"""

from __future__ import annotations

import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import main

one_at_a_time = threading.RLock()
answer = S3Response.key_response


def key_response(self: S3Response, request: Any, full_url: str, headers: Any) -> Any:
    request.get_data()  # before the lock: its sender may be slow
    with one_at_a_time:
        return answer(self, request, full_url, headers)


if __name__ == "__main__":
    S3Response.key_response = key_response  # type: ignore[method-assign]
    main()
