"""Requests to one application: headers, errors, and the retries that are safe."""

from __future__ import annotations

import random
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_before_delay

from wllm_ray.client.border import error_from_response, shown, translated
from wllm_ray.errors import CaptureError, NotFoundError, UnavailableError
from wllm_ray.schema import ModelCard, ModelList

__all__ = ["Connection"]

Answer = TypeVar("Answer", bound=BaseModel)

CONNECT_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 15.0


class Connection:
    """One HTTP client for one application. Reads no environment, proxies included.

    Args:
        base_url: Where the application listens.
        api_key: Its key, or None.
        timeout_s: Seconds for one answer.
        patience_s: How long a request is repeated while nobody takes it; 0 for never.
        transport: What carries requests, instead of the network.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        patience_s: float = 0.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        with translated(base_url):
            self.address = shown(base_url).rstrip("/")
            self._client = httpx.AsyncClient(
                base_url=base_url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
                transport=transport,
                trust_env=False,
            )
        self.patience_s = patience_s

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def once(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request, once.

        Raises:
            WLLMError: No answer, or one with an error status.
        """
        with translated(f"{self.address}{path}"):
            response = await self._client.request(method, path, **options)
        if response.status_code != httpx.codes.OK:
            raise error_from_response(response)
        return response

    async def get(self, path: str, kind: type[Answer]) -> Answer:
        """Read one of the describing routes."""
        response = await self._patiently("GET", path)
        return self.parse(response, kind)

    async def post(self, path: str, body: bytes, *, accept: str) -> httpx.Response:
        """Send rows to be captured; repeated where nobody took them.

        Repeating a POST is safe here: an inline answer changes nothing on the server, and the same
        dataset request attaches to the running job or finds the committed dataset. An answer that
        took too long is not asked for again, since the work may still be going on.
        """
        headers = {"Content-Type": "application/json", "Accept": accept}
        return await self._patiently("POST", path, content=body, headers=headers)

    async def models(self) -> list[ModelCard]:
        """What the application serves."""
        return (await self.get("/v1/models", ModelList)).data

    async def model(self, name: str) -> ModelCard:
        """One served model.

        Raises:
            NotFoundError: It is not served here (``model_not_found``).
        """
        cards = await self.models()
        for card in cards:
            if card.id == name:
                return card
        served = ", ".join(repr(card.id) for card in cards) or "none"
        raise NotFoundError(
            f"model {name!r} is not served at {self.address}; served: {served}",
            code="model_not_found",
        )

    def parse(self, response: httpx.Response, kind: type[Answer]) -> Answer:
        """Read a JSON answer.

        Raises:
            CaptureError: It has another shape (``protocol_error``).
        """
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)
            where = ".".join(map(str, problems[0]["loc"])) or "the body"
            raise CaptureError(
                f"expected a {kind.__name__} from {shown(response.request.url)}, found a wrong "
                f"{where} ({problems[0]['msg']}); client and server versions may differ",
                code="protocol_error",
            ) from None

    async def _patiently(self, method: str, path: str, **options: Any) -> httpx.Response:
        retrying = AsyncRetrying(
            retry=retry_if_exception(_nobody_took_it),
            stop=stop_before_delay(self.patience_s),
            wait=_wait,
            reraise=True,
        )
        response: httpx.Response = await retrying(self.once, method, path, **options)
        return response


def _nobody_took_it(error: BaseException) -> bool:
    return isinstance(error, UnavailableError) and error.code != "deadline_exceeded"


def _wait(state: RetryCallState) -> float:
    """What the server asked for, else longer and longer; spread, so that callers do not meet."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.details.get("retry_after_s") if isinstance(error, UnavailableError) else None
    base = asked if isinstance(asked, int) else 0.25 * 2.0**state.attempt_number
    return min(base, LONGEST_WAIT_S) * random.uniform(0.75, 1.25)  # noqa: S311 (no secret)
