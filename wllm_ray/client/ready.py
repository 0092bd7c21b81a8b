"""Waiting for an application, and asking Ray's dashboard why it does not come."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx
from pydantic import BaseModel

from wllm_ray.client.connection import Connection
from wllm_ray.errors import CaptureError, NotFoundError, UnavailableError, WLLMError

__all__ = ["ApplicationState", "Dashboard", "expect_starting", "wait_ready"]

POLL_S = 0.5
FAILED_STATES = ("DEPLOY_FAILED", "UNHEALTHY")
# While an application starts, Ray Serve's proxy knows no route to it and answers 404.
NOT_YET = (UnavailableError, NotFoundError, CaptureError)


class ApplicationState(BaseModel):
    """What Ray says of one application; its other fields do not matter here."""

    status: str
    message: str = ""
    route_prefix: str | None = None


class _Applications(BaseModel):
    applications: dict[str, ApplicationState]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """Ray's dashboard, whose REST API knows the state of each Serve application.

    Attributes:
        connection: To the dashboard.
        route_prefix: Where the application is mounted: the path of its base URL.
    """

    connection: Connection
    route_prefix: str = "/"

    async def state(self) -> ApplicationState | str:
        """The application's state, or in words why it is not known."""
        try:
            found = self.connection.parse(
                await self.connection.once("GET", "/api/serve/applications/"), _Applications
            )
        except WLLMError as error:
            return f"Ray's dashboard at {self.connection.address} says nothing ({error.code})"
        for state in found.applications.values():
            if state.route_prefix == self.route_prefix:
                return state
        names = ", ".join(sorted(found.applications)) or "none"
        return f"Ray serves no application at {self.route_prefix} (applications: {names})"


async def wait_ready(
    connection: Connection, timeout_s: float, dashboard: Dashboard | None = None
) -> None:
    """Return once ``/readyz`` says so.

    Raises:
        UnavailableError: The application failed to start (``deploy_failed``, quoting Ray), or was
            not ready in time (``not_ready``, saying what was seen last).
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            await connection.once("GET", "/readyz", timeout=httpx.Timeout(5.0))
        except NOT_YET as error:
            seen = error.message
        else:
            return
        if dashboard is not None:
            seen += f"; {await _starting(dashboard)}"
        if time.monotonic() + POLL_S > deadline:
            raise UnavailableError(
                f"{connection.address} was not ready within {timeout_s:g} s; last seen: {seen}",
                code="not_ready",
            )
        await asyncio.sleep(POLL_S)


async def _starting(dashboard: Dashboard) -> str:
    """The application's state in words.

    Raises:
        UnavailableError: It will not get ready by waiting (``deploy_failed``).
    """
    state = await dashboard.state()
    if isinstance(state, str):
        return state
    expect_starting(state)
    return f"Ray says {state.status}"


def expect_starting(state: ApplicationState) -> None:
    """Refuse to wait for an application that will not get ready by waiting.

    Raises:
        UnavailableError: It has failed (``deploy_failed``, quoting Ray).
    """
    if state.status in FAILED_STATES:
        raise UnavailableError(
            f"the application is {state.status}; Ray says: {state.message.strip() or 'nothing'}. "
            f"Mend the cause and deploy it again",
            code="deploy_failed",
            details={"status": state.status},
        )
