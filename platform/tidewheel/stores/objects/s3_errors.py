"""Errors of the S3 client: whether a retry can help, and how they are reported."""

from __future__ import annotations

from typing import Any

from tidewheel.errors import StorageAwayError, StorageError
from tidewheel.stores.objects.service import Problem, SilentError

TRANSIENT_CODES = frozenset({"InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttling",
                             "ThrottlingException", "RequestLimitExceeded", "OperationAborted",
                             "ConditionalRequestConflict", "500", "502", "503", "504"})
EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
REGION_CODES = frozenset({"PermanentRedirect", "301", "IllegalLocationConstraintException"})
SKEW_CODE = "RequestTimeTooSkewed"
MUTE_CODES = frozenset({"301", "400", "403"})
"""The answer to a HEAD has no body, so it does not say what these statuses mean."""
_BY_CODE = {"PreconditionFailed": Problem.EXISTS, "412": Problem.EXISTS, "InvalidRange": Problem.BEYOND,
            "NoSuchUpload": Problem.NO_UPLOAD}


def classes() -> tuple[type[BaseException], ...]:
    """Return the classes of errors that requests raise."""
    import aiohttp
    import botocore.exceptions as bx

    return OSError, ValueError, bx.BotoCoreError, bx.ClientError, aiohttp.ClientError


def problem(error: BaseException) -> Problem:
    """Return what an error of a request calls for."""
    import aiohttp
    import botocore.exceptions as bx
    from botocore.parsers import ResponseParserError

    if (named := _BY_CODE.get(code(error))) is not None:
        return named
    if isinstance(error, FileNotFoundError):
        return Problem.MISSING
    if isinstance(error, bx.EndpointConnectionError) and not isinstance(_inner(error), aiohttp.ClientConnectorError):
        return Problem.TRANSIENT  # the client calls it so, too, when a connection breaks off later
    if isinstance(error, bx.EndpointConnectionError | bx.ConnectTimeoutError | bx.ProxyConnectionError):
        return Problem.UNREACHABLE
    expired = (bx.CredentialRetrievalError, bx.UnauthorizedSSOTokenError, bx.SSOTokenLoadError, bx.TokenRetrievalError)
    if isinstance(error, expired) or code(error) in EXPIRED_CODES:
        return Problem.EXPIRED
    lost = (SilentError, bx.HTTPClientError, bx.IncompleteReadError, bx.ResponseStreamingError, ResponseParserError,
            aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionResetError, ConnectionAbortedError,
            BrokenPipeError)
    if isinstance(error, lost) or isinstance(error.__cause__, lost) or code(error) in TRANSIENT_CODES:
        return Problem.TRANSIENT
    return Problem.FINAL


def code(error: BaseException) -> str:
    """Return the protocol's code behind a client's error, such as "NoSuchKey"; "" when there is none."""
    return str(response(error).get("Error", {}).get("Code", ""))


def response(error: BaseException) -> dict[str, Any]:
    """Return the store's answer behind a client's error, {} when there was none."""
    return getattr(error.__cause__ or error, "response", None) or {}


def explained(error: BaseException, where: str, bucket: str) -> StorageError:
    """Return a client's error as a StorageError with a hint.

    Args:
        error: what the client raised.
        where: URI of the object.
        bucket: name of the bucket.
    """
    import botocore.exceptions as bx

    reason = short(error)
    region = _region(error)
    if code(error) in REGION_CODES or (code(error) == "AuthorizationHeaderMalformed" and region):
        location = f"region {region}" if region else "another region"
        return StorageError(
            f"the bucket {bucket!r} is in {location} ({reason})", where=where,
            fix=f"set AWS_REGION={region or 'to the region of the bucket'}, and if AWS_ENDPOINT_URL is set, that to "
                "the endpoint of the region")
    if code(error) == SKEW_CODE:
        return StorageError(f"this machine's clock is wrong, so the store refuses its signatures ({reason})",
                            where=where, fix="set the clock (chrony, ntp); `tidewheel doctor --storage URI` shows by "
                            "how much it is off")
    match problem(error):
        case Problem.EXPIRED:
            return StorageAwayError(f"the credentials have expired ({reason})", where=where,
                                    fix="renew them (`aws sso login`, the credentials file): each try reads them again")
        case Problem.UNREACHABLE:
            return StorageAwayError(f"the object store does not answer ({reason})", where=where,
                                    fix="check AWS_ENDPOINT_URL and that the server is up")
    if isinstance(error, PermissionError | bx.NoCredentialsError | bx.PartialCredentialsError | bx.ProfileNotFound):
        return StorageError(f"access refused ({reason})", where=where,
                            fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role that may read "
                            "and write this bucket; `tidewheel doctor --storage URI` tests it")
    if isinstance(error, bx.ParamValidationError):
        return StorageError(f"{bucket!r} is not a valid bucket name", where=where,
                            fix="3 to 63 small letters, digits, dots and dashes")
    if isinstance(error, SilentError):
        return StorageAwayError(f"the object store takes requests but does not answer in time ({reason})", where=where,
                                fix="check the store and the network; a proxy or a firewall can also cause this")
    return StorageAwayError(f"the object store failed ({reason})", where=where,
                            fix="try again; if it persists, check AWS_ENDPOINT_URL and the store")


def short(error: BaseException) -> str:
    """Return one line about `error`, with the number of tries if there were several."""
    cause = _inner(error) if problem(error) is Problem.TRANSIENT and _inner(error) is not None else error
    text = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
    named = code(error)
    if named and not named.isdigit() and named not in text:
        text = f"{named}: {text}"
    return ", ".join([text, *getattr(error, "__notes__", ())])


def _inner(error: BaseException) -> BaseException | None:
    """Return the error of the HTTP client underneath."""
    return getattr(error, "kwargs", {}).get("error")


def _region(error: BaseException) -> str:
    """Return the bucket's region if the store's answer has it, else ""."""
    answer = response(error)
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or answer.get("Error", {}).get("Region") or "")
