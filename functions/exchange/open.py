"""From a URL to an exchange: the one place that knows every backend. boto3 and redis load only when a URL needs them.

    /scratch/exchange, dir:///scratch/exchange                a directory
    redis://host:6379/0, rediss://..., unix:///path?db=0      a Redis (rediss: over TLS)
    s3://bucket/prefix?endpoint=http://host:port&region=...   a bucket; without endpoint, AWS
    tiered+s3://bucket/prefix?endpoint=...&redis=redis://host:6379/0   both

A URL holds no secret: REDIS_PASSWORD (and REDIS_USERNAME), and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or another
member of boto3's chain), come from the environment.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from functions.exchange.base import Exchange, check_key
from functions.exchange.directory import DirectoryExchange
from functions.exchange.node import with_node

if TYPE_CHECKING:
    from functions.exchange.redis import RedisExchange
    from functions.exchange.s3 import Fence, S3Exchange

REDIS_SCHEMES = ("redis", "rediss", "unix")


def open_exchange(url: str, job: str) -> Exchange:
    """The exchange at `url` for one job: its keys lie under `<url>/<job>/`, apart from those of other jobs.

    Raises ValueError for a URL of another form, Unavailable when the store is away, Unsuitable when it lacks a
    guarantee or refuses our credentials.
    """
    if "/" in job or job in ("", ".", ".."):
        raise ValueError(f"job {job!r} names a folder of the exchange: no '/'")
    if "://" not in url:
        if not url:
            raise ValueError("exchange '': a directory, or a URL that begins with dir, redis, s3 or tiered+s3")
        return DirectoryExchange(f"{url}/{job}")
    check_key(job)  # a directory takes any name, a store does not
    match urlsplit(url).scheme:
        case "dir":
            return _directory(url, job)
        case scheme if scheme in REDIS_SCHEMES:
            return _redis(url, job)
        case "s3":
            return with_node(_s3(url, job, None), job)
        case "tiered+s3":
            return _tiered(url, job)
        case scheme:
            raise ValueError(f"exchange {_shown(url)}: no kind {scheme!r} (dir, redis, rediss, unix, s3, tiered+s3)")


def _directory(url: str, job: str) -> DirectoryExchange:
    parts = urlsplit(url)
    if parts.netloc or not parts.path or parts.query:
        raise ValueError(f"exchange {_shown(url)}: a directory is written dir:///absolute/path")
    return DirectoryExchange(f"{unquote(parts.path)}/{job}")


def _redis(url: str, job: str) -> RedisExchange:
    parts = urlsplit(url)
    if parts.password:
        raise ValueError(f"exchange {_shown(url)}: a URL holds no password; set REDIS_PASSWORD in the environment")
    if parts.scheme not in REDIS_SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
        raise ValueError(
            f"exchange {_shown(url)}: a Redis is written redis://host:6379/0, rediss://... or unix:///path"
        )
    from functions.exchange.redis import ROOT, RedisExchange

    return RedisExchange(url, f"{ROOT}{job}/")


def redis_place(url: str) -> str | None:
    """The Redis of an exchange's URL, if it has one."""
    return url if urlsplit(url).scheme in REDIS_SCHEMES else dict(parse_qsl(urlsplit(url).query)).get("redis")


def s3_place(url: str) -> tuple[str, str, str | None, str | None]:
    """Of an exchange's URL the bucket, the folder of all jobs in it ("" or with its slash), endpoint and region."""
    options = _options(url, "endpoint", "region", *(["redis"] if url.startswith("tiered+") else []))
    parts = urlsplit(url)
    prefix = unquote(parts.path).strip("/")
    if not parts.netloc or parts.username or parts.password or parts.port:
        raise ValueError(f"exchange {_shown(url)}: a bucket is written s3://bucket/prefix?endpoint=http://host:port")
    if prefix:
        check_key(prefix)
    endpoint = options.get("endpoint")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"exchange {_shown(url)}: endpoint {endpoint!r} does not begin with http:// or https://")
    return parts.netloc, f"{prefix}/" if prefix else "", endpoint, options.get("region")


def _s3(url: str, job: str, fence: Fence | None) -> S3Exchange:
    bucket, folder, endpoint, region = s3_place(url)
    from functions.exchange.s3 import S3Exchange

    return S3Exchange(bucket, folder, job, endpoint=endpoint, region=region, fence=fence)


def _tiered(url: str, job: str) -> Exchange:
    options = _options(url, "endpoint", "region", "redis")
    if "redis" not in options:
        raise ValueError(f"exchange {_shown(url)}: tiered+s3:// needs its Redis: ...&redis=redis://host:6379/0")
    from functions.exchange.tiered import TieredExchange

    redis = _redis(options["redis"], job)
    s3 = _s3(url, job, fence=redis)
    return TieredExchange(redis, s3, with_node(s3, job))


def _options(url: str, *known: str) -> dict[str, str]:
    options = dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise ValueError(f"exchange {_shown(url)}: unknown option {name!r} ({', '.join(known)})")
    return options


def _shown(url: str) -> str:
    """The URL for a message, without what may be a secret."""
    return repr(re.sub("://[^/@]*@", "://", url.partition("?")[0]))
