"""``wllm wait-ready``: return when the application can work, or say why it cannot."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from wllm_ray.cli.interruption import run_async
from wllm_ray.cli.options import LOCAL_APPLICATION, LOCAL_DASHBOARD, BaseUrl
from wllm_ray.cli.reporting import reports_errors, say

__all__ = ["wait_until_ready"]

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait.")]
DashboardUrl = Annotated[
    str,
    typer.Option(
        help="Ray's dashboard, asked why an application does not start; empty: nobody is asked."
    ),
]
DashboardToken = Annotated[
    str | None,
    typer.Option(
        help="Where the cluster asks for a token. Default: as Ray does, RAY_AUTH_TOKEN, the file "
        "that RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token."
    ),
]


@reports_errors
def wait_until_ready(
    *,
    base_url: BaseUrl = LOCAL_APPLICATION,
    timeout: Timeout = 600.0,
    dashboard_url: DashboardUrl = LOCAL_DASHBOARD,
    dashboard_token: DashboardToken = None,
) -> None:
    """Wait until at least one replica has passed its self-test.

    Says on stderr what it sees, whenever that changes. Ends early, with Ray's own message, when
    the application has failed to start.
    """
    from wllm_ray.client.ray_token import ray_token

    if dashboard_url:
        dashboard_token = dashboard_token or ray_token(os.environ, Path.home())
    run_async(_wait(base_url, timeout, dashboard_url, dashboard_token))
    say(f"{base_url} is ready")


async def _wait(base_url: str, timeout_s: float, dashboard_url: str, token: str | None) -> None:
    from httpx import URL

    from wllm_ray.client.connection import Connection
    from wllm_ray.client.ray_cluster import gone_cluster
    from wllm_ray.client.ready import Dashboard, wait_ready

    async with contextlib.AsyncExitStack() as closing:
        connection = Connection(base_url)
        closing.push_async_callback(connection.close)
        place, dashboard = URL(base_url), None
        if dashboard_url:
            board = Connection(dashboard_url, api_key=token, timeout_s=5.0)
            closing.push_async_callback(board.close)
            dashboard = Dashboard(board, place.path.rstrip("/") or "/")
        await wait_ready(
            connection,
            timeout_s,
            dashboard,
            # What Ray would do here says nothing of another machine.
            why_silent=lambda: gone_cluster(os.environ) if place.host in THIS_MACHINE else None,
            on_change=lambda seen: say(f"waiting: {seen}"),
        )
