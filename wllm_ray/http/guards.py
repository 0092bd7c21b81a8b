"""What stands before every route: the API key, the body's bound, and errors in one shape."""

from __future__ import annotations

import asyncio
import hmac
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from wllm_ray.errors import (
    NotFoundError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    WLLMError,
)

__all__ = [
    "error_response",
    "install_error_handlers",
    "read_body",
    "require_api_key",
    "unless_gone",
]

Result = TypeVar("Result")

OPEN_PATHS = ("/livez", "/readyz")
NO_KEY = "this application needs an API key, and none was sent; send `Authorization: Bearer …`"
WRONG_KEY = "the API key that was sent is not the one of this application"
# What servers log for a request whose client left; it has no name in HTTP.
CLIENT_GONE = 499

logger = logging.getLogger("wllm_ray.http")


def error_response(error: WLLMError) -> JSONResponse:
    """The one shape of errors, with Retry-After where waiting may help."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else None
    return JSONResponse(error.to_json(), status_code=error.http_status, headers=headers)


def _log_unexpected(error: Exception) -> None:
    """Type and place only: a foreign exception's text may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("unexpected %s\n%s", type(error).__name__, frames)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure as ``{error: {code, message, stage, details}}``."""

    async def on_known(_request: Request, error: Exception) -> Response:
        assert isinstance(error, WLLMError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(
            NotFoundError(
                f"no route {request.method} {request.url.path}; /openapi.json lists them",
                code="route_not_found",
            )
        )
        response.status_code = error.status_code
        return response

    app.add_exception_handler(WLLMError, on_known)
    app.add_exception_handler(HTTPException, on_http)


def require_api_key(app: FastAPI, api_key: str | None) -> None:
    """Refuse requests without the key, and turn what nobody expected into an opaque 500.

    The key comes as ``Authorization: Bearer …`` or ``X-API-Key: …``; it is compared in constant
    time. ``/livez`` and ``/readyz`` stay open for probes.
    """

    @app.middleware("http")
    async def guard(
        request: Request, proceed: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if api_key and _path(request) not in OPEN_PATHS:
            wrong = _wrong_key(_sent_key(request), api_key)
            if wrong:
                return error_response(UnauthorizedError(wrong))
        try:
            return await proceed(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)  # nobody reads it
        except Exception as error:  # noqa: BLE001 (the last border of the process)
            _log_unexpected(error)
            return error_response(WLLMError("an unexpected fault; the server's log has the place"))


def _path(request: Request) -> str:
    """The route's path, without the prefix under which the application is served."""
    prefix = str(request.scope.get("root_path", "")).rstrip("/")
    return request.url.path.removeprefix(prefix)


def _sent_key(request: Request) -> str:
    """The key that came with the request; empty where none did."""
    bearer = request.headers.get("authorization", "")
    scheme, _, token = bearer.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _wrong_key(sent: str, api_key: str) -> str | None:
    if hmac.compare_digest(sent.encode(), api_key.encode()):
        return None
    return WRONG_KEY if sent else NO_KEY


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body, refusing it as soon as it is known to be over the bound.

    Raises:
        TooLargeError: Declared or actual size is over ``max_bytes`` (code ``body_too_large``).
    """
    error = TooLargeError(
        f"the body is over the bound of {max_bytes} bytes; send fewer rows a request",
        code="body_too_large",
        details={"max_body_bytes": max_bytes},
    )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise error
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise error
    return bytes(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work that only this caller wants; a caller that leaves stops it.

    Args:
        request: The caller's request, its body already read.
        work: What to wait for.

    Raises:
        UnavailableError: The caller has left; nobody reads the answer.
    """
    working = asyncio.ensure_future(work)
    # After the body, the only message that a server has left is that the caller is gone.
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    raise UnavailableError("the caller left before the answer was ready")
