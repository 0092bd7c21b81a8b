"""The client for code without an event loop: the async one, run on a private loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from wllm_ray.client.aio import AsyncWLLMClient
from wllm_ray.concurrency import LoopThread
from wllm_ray.dataset.stores.store import Root

__all__ = ["WLLMClient"]

P = ParamSpec("P")
Result = TypeVar("Result")


def _blocking(
    method: Callable[Concatenate[AsyncWLLMClient, P], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[WLLMClient, P], Result]:
    """The same method, waiting for its result."""

    @functools.wraps(method)
    def call(self: WLLMClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._run(method, *args, **kwargs)

    return call


class WLLMClient:
    """Talks to one application. Use it as a context manager, or call :meth:`close`.

    Args:
        base_url: Where the application listens, for example ``http://127.0.0.1:8000``.
        artifact_root: The application's storage root as seen from this machine; only
            ``persist=True`` needs it.
        api_key: The application's key, if it has one.
        timeout: Seconds for one answer.
        patience: Seconds that a request is repeated while nobody takes it, because the
            application is starting, busy or gone.
        transport: What carries requests, instead of the network.
    """

    def __init__(
        self,
        base_url: str,
        artifact_root: Root | None = None,
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        patience: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = AsyncWLLMClient(
            base_url,
            artifact_root,
            api_key,
            timeout=timeout,
            patience=patience,
            transport=transport,
        )
        self._thread = LoopThread("wllm-client")

    wait_until_ready = _blocking(AsyncWLLMClient.wait_until_ready)
    models = _blocking(AsyncWLLMClient.models)
    extract_activations = _blocking(AsyncWLLMClient.extract_activations)

    def close(self) -> None:
        """Close all connections; does nothing the second time."""
        if self._thread.is_running:
            self._thread.run(self._client.close())
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(
        self,
        method: Callable[Concatenate[AsyncWLLMClient, P], Coroutine[Any, Any, Result]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Result:
        return self._thread.run(method(self._client, *args, **kwargs))
