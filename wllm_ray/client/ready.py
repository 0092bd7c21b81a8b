"""Waiting for an application, and asking Ray's dashboard why it does not come."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from wllm_ray.client.connection import Connection
from wllm_ray.client.ray_token import HOW_TO_AUTHENTICATE, why_refused
from wllm_ray.errors import (
    CaptureError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
    WLLMError,
)

__all__ = ["ApplicationState", "Dashboard", "expect_starting", "wait_ready"]

POLL_S = 0.5
PROBE_TIMEOUT_S = 5.0
# So long nothing may listen before it is asked whether anything is coming.
SILENCE_S = 30.0
_NOBODY = "server_unreachable"
# An application that is UNHEALTHY has run before, and Ray goes on replacing its replicas.
FAILED_STATES = ("DEPLOY_FAILED",)
# While an application starts, Ray Serve's proxy knows no route to it and answers 404.
NOT_YET = (UnavailableError, NotFoundError, CaptureError)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class _Deployed(BaseModel):
    route_prefix: str | None = None


class ApplicationState(BaseModel):
    """What Ray says of one application; its other fields do not matter here.

    Until it is built, ``route_prefix`` is None: only the configuration that was sent, if there
    is one, says where it will be mounted.
    """

    status: str
    message: str = ""
    route_prefix: str | None = None
    deployed_app_config: _Deployed | None = None

    def is_at(self, route_prefix: str) -> bool:
        """Whether it is, or may be, the application that is mounted there."""
        sent = self.deployed_app_config
        known = self.route_prefix or (sent and sent.route_prefix)
        return known == route_prefix or (not known and self.status in FAILED_STATES)


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
        except UnauthorizedError as error:
            where = f"Ray's dashboard at {self.connection.address}"
            return f"{where} {why_refused(error)}; {HOW_TO_AUTHENTICATE}"
        except WLLMError as error:
            return f"Ray's dashboard at {self.connection.address} says nothing ({error.code})"
        here = [one for one in found.applications.values() if one.is_at(self.route_prefix)]
        # One that is mounted there rather than one that may have been meant for it.
        for state in sorted(here, key=lambda one: one.route_prefix is None):
            return state
        names = ", ".join(sorted(found.applications)) or "none"
        return f"Ray serves no application at {self.route_prefix} (applications: {names})"


async def wait_ready(
    connection: Connection,
    timeout_s: float,
    dashboard: Dashboard | None = None,
    *,
    why_silent: Callable[[], str | None] = lambda: None,
    on_change: Callable[[str], None] = lambda _seen: None,
) -> None:
    """Return once ``/readyz`` says so.

    Args:
        connection: To the application.
        timeout_s: How long to wait.
        dashboard: Asked why it is not ready.
        why_silent: Asked, in a thread, why nothing listens there for so long.
        on_change: Hears in words what is seen, whenever that changes.

    Raises:
        UnavailableError: The application failed to start (``deploy_failed``, quoting Ray), or was
            not ready in time (``not_ready``, saying what was seen last).
    """
    heard = time.monotonic()
    deadline = heard + timeout_s
    before = ""
    while True:
        try:
            await connection.once("GET", "/readyz", timeout=PROBE_TIMEOUT_S)
        except NOT_YET as error:
            seen = _seen(error, connection.address)
            heard = heard if error.code == _NOBODY else time.monotonic()
        else:
            return
        is_silent = time.monotonic() - heard >= SILENCE_S
        if is_silent and (reason := await asyncio.to_thread(why_silent)):
            seen += f"; {reason}"
        if dashboard is not None:
            seen += f"; {await _starting(dashboard)}"
        if seen != before:
            before = seen
            on_change(seen)
        if time.monotonic() + POLL_S > deadline:
            raise UnavailableError(
                f"{connection.address} was not ready within {timeout_s:g} s; last seen: {seen}",
                code="not_ready",
            )
        await asyncio.sleep(POLL_S)


def _seen(error: WLLMError, address: str) -> str:
    if error.code == _NOBODY:
        return f"no answer from {address}: nothing listens there yet"
    if error.code == "route_not_found":
        return f"{address} answers, but knows no application yet"
    if error.code == "deadline_exceeded":
        return f"{address} is there, but /readyz did not answer in time"
    return error.message


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
        message = _COLOURS.sub("", state.message).strip() or "nothing"
        raise UnavailableError(
            f"the application is {state.status}; Ray says: {message}\n"
            f"Mend the cause and deploy it again",
            code="deploy_failed",
            details={"status": state.status},
        )
