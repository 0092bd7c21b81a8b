"""The one place where answers and transport exceptions become errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from wllm_ray.digest import parse_json
from wllm_ray.errors import (
    ERROR_CODES,
    CaptureError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    WLLMError,
    error_class,
)

__all__ = ["error_from_response", "shown", "translated"]

# What a proxy in front of the application means, which does not speak our JSON.
_BY_STATUS: dict[int, tuple[type[WLLMError], str]] = {
    401: (UnauthorizedError, "unauthorized"),
    403: (UnauthorizedError, "unauthorized"),
    404: (NotFoundError, "route_not_found"),
    408: (UnavailableError, "deadline_exceeded"),
    413: (TooLargeError, "body_too_large"),
    429: (OverloadedError, "overloaded"),
    # Ray Serve's proxy answers 500 when the process behind it dies with the request in hand.
    500: (UnavailableError, "replica_lost"),
    502: (UnavailableError, "replica_lost"),
    503: (UnavailableError, "not_ready"),
    504: (UnavailableError, "deadline_exceeded"),
}

_WRONG_ADDRESS = (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError)
_WRONG_ANSWER = (
    httpx.DecodingError,
    httpx.TooManyRedirects,
    httpx.HTTPStatusError,
    httpx.CookieConflict,
    httpx.StreamError,
)
_NO_CONNECTION_IN_TIME = (httpx.ConnectTimeout, httpx.PoolTimeout)


def error_from_response(response: httpx.Response) -> WLLMError:
    """The exception that an answer with an error status stands for."""
    body = _error_body(response)
    error = _from_proxy(response) if body is None else _from_body(response, body)
    seconds = response.headers.get("retry-after", "")
    if seconds.isascii() and seconds.isdigit():
        error.details["retry_after_s"] = int(seconds)
    return error


def _error_body(response: httpx.Response) -> dict[str, Any] | None:
    """The ``error`` object of our own error answers, or None for anything else."""
    try:
        body = parse_json(response.content)
    except InvalidInputError:
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    texts = (error.get("code"), error.get("message"))
    return error if all(isinstance(text, str) for text in texts) else None


def _from_body(response: httpx.Response, body: dict[str, Any]) -> WLLMError:
    code, stage = body["code"], body.get("stage")
    details = body["details"] if isinstance(body.get("details"), dict) else {}
    kind = error_class(code)
    if code not in ERROR_CODES:
        # A newer server: its status still says what a handler should do.
        kind, fallback = _BY_STATUS.get(response.status_code, (WLLMError, "internal_error"))
        code, details = fallback, {**details, "server_code": code}
    stage = stage if isinstance(stage, str) else None
    return kind(body["message"], code=code, stage=stage, details=details)


def _from_proxy(response: httpx.Response) -> WLLMError:
    kind, code = _BY_STATUS.get(response.status_code, (CaptureError, "protocol_error"))
    found = response.headers.get("content-type", "no content type")
    request = response.request
    # The body is not quoted: a proxy may put the text of an exception there, and with it a prompt.
    return kind(
        f"expected an answer of a wllm_ray application, found status {response.status_code} "
        f"({found}) for {request.method} {shown(request.url)}; something in front of the "
        f"application answered, or the address is another service's",
        code=code,
        details={"status": response.status_code},
    )


def shown(url: httpx.URL | str) -> str:
    """A URL without the credentials that may be part of it."""
    return str(httpx.URL(url).copy_with(userinfo=b""))


def _translate(error: Exception, address: str) -> WLLMError:
    name = type(error).__name__
    if isinstance(error, _WRONG_ADDRESS):
        return InvalidInputError(
            f"expected an address such as http://127.0.0.1:8000, found {address} ({name})",
            code="invalid_argument",
        )
    if isinstance(error, _WRONG_ANSWER):
        return CaptureError(
            f"the answer of {address} cannot be read ({name}); is it a wllm_ray application?",
            code="protocol_error",
        )
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, _NO_CONNECTION_IN_TIME):
        return UnavailableError(
            f"{address} did not answer in time ({name}); send fewer rows at once, or allow a "
            f"longer timeout",
            code="deadline_exceeded",
        )
    return UnavailableError(
        f"no answer from {address} ({name}); is the application running there? While it starts, "
        f"`wllm wait-ready` says how far it is",
        code="server_unreachable",
    )


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn every exception of the HTTP library into one of ours; the cause is kept.

    Args:
        address: Where the request goes, for the message.

    Raises:
        UnavailableError: No answer (``server_unreachable``, ``deadline_exceeded``).
        InvalidInputError: An address that cannot be (``invalid_argument``).
        CaptureError: An answer that cannot be read (``protocol_error``).
    """
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError) as error:
        raise _translate(error, address) from error
