"""From a URL to an exchange: the one place that knows every backend. boto3 and redis load only when they are named.

dir:///scratch/exchange          a directory (a plain path too)
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from functions.exchange.base import Exchange, check_key
from functions.exchange.directory import DirectoryExchange


def open_exchange(url: str, job: str) -> Exchange:
    """The exchange at `url` for one job: its keys lie under `<url>/<job>/`, apart from those of other jobs.

    Raises ValueError for a URL of another form, Unavailable when the store is away, Unsuitable when it lacks a guarantee.
    """
    if "/" in check_key(job):
        raise ValueError(f"job {job!r} names a folder of the exchange: no '/'")
    if "://" not in url:
        return DirectoryExchange(f"{url}/{job}")
    parts = urlsplit(url)
    match parts.scheme:
        case "dir":
            if parts.netloc or not parts.path or parts.query:
                raise ValueError(f"exchange {url!r}: a directory is written dir:///absolute/path")
            return DirectoryExchange(f"{unquote(parts.path)}/{job}")
        case scheme:
            raise ValueError(f"exchange {url!r}: unknown kind {scheme!r} (dir, redis, rediss, s3, tiered+...)")
