"""The one boundary where S3's failures become the exchange's: one clear line each."""

import contextlib
from collections.abc import Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)
from urllib3.exceptions import HTTPError

from functions.exchange.base import ExchangeError, Full, NotFound, Unavailable, Unsuitable

CREDENTIALS = {
    "403",
    "AccessDenied",
    "AuthorizationHeaderMalformed",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
FULL = {"507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull",
        "XMinioAdminBucketQuotaExceeded"}  # fmt: skip
NOT_THERE = {"404", "NoSuchKey", "NotFound"}


def code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextlib.contextmanager
def s3_errors(key: str, store: str) -> Iterator[None]:
    """Raises NotFound, Unavailable, Unsuitable or ExchangeError for what boto3 raises; `store` names the place."""
    try:
        yield
    except ClientError as error:
        name, message = code(error), error.response.get("Error", {}).get("Message", "")
        if name == "NoSuchBucket":
            raise Unsuitable(f"{key}: {store}: no such bucket (make it, or correct the exchange's URL)") from error
        if name in NOT_THERE:
            raise NotFound(f"{key}: no such value in {store}", key) from error
        if name in CREDENTIALS or status(error) == 403:
            raise Unsuitable(
                f"{key}: {store} refuses our credentials ({name}): see AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
                "the rights on the bucket"
            ) from error
        if name in FULL or status(error) == 507:
            raise Full(key, store, name) from error
        if status(error) >= 500 or name in ("SlowDown", "Throttling", "RequestTimeout"):
            raise Unavailable(f"{key}: {store} fails ({status(error)} {name}): {message}", store) from error
        raise ExchangeError(f"{key}: {store}: {status(error)} {name}: {message}") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise Unsuitable(
            f"{key}: no credentials for {store}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    except NoRegionError as error:
        raise Unsuitable(f"{key}: no region for {store}: set AWS_REGION or ?region= in the exchange's URL") from error
    except (ConnectionError, HTTPClientError, HTTPError, OSError) as error:
        raise Unavailable(f"{key}: {store} does not answer: {error}", store) from error
    except RuntimeError as error:  # botocore, of a credential_process: "... credentials are still expired"
        if "expired" not in str(error):
            raise
        raise Unavailable(f"{key}: our credentials of {store} have expired, and are not renewed yet", store) from error
    except BotoCoreError as error:
        raise ExchangeError(f"{key}: {store}: {error}") from error
    except ValueError as error:  # botocore: "Invalid endpoint: ..."
        if "endpoint" not in str(error):
            raise
        raise Unsuitable(f"{key}: {store}: {error}") from error
