"""Joining an application that runs on a Ray cluster, without ever starting either."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import AuthenticationError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.schema import ApplicationStatusOverview, ServeStatus
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from deployments.backend import REPLICA_DEPLOYMENT, translate
from wllm_ray.client.ready import ApplicationState, expect_starting
from wllm_ray.errors import NotFoundError, UnauthorizedError, UnavailableError
from wllm_ray.extraction import Offer
from wllm_ray.records import CaptureIdentity, InputRow, RowRecord

__all__ = ["JoinedApplication", "connect", "disconnect", "wait_running", "waits_for"]

POLL_S = 0.5
CALL_TIMEOUT_S = 120.0
# A request of this many rows keeps messages small and takes the ingress some milliseconds.
TOKENIZE_ROWS = 256
START = "start it with `serve run serve_config.yaml`"


def connect() -> None:
    """Join the cluster that this job runs on (``RAY_ADDRESS``), or else one on this machine.

    Raises:
        UnavailableError: There is none (``server_unreachable``).
        UnauthorizedError: It wants a token.
    """
    try:
        # Without an address, Ray would start a cluster of its own. What workers print stays in
        # their own logs: the last line of this job's log is ours.
        ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
    except AuthenticationError as error:
        raise UnauthorizedError(
            "the Ray cluster wants a token; set RAY_AUTH_MODE=token, with the token in "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token"
        ) from error
    except (ConnectionError, RuntimeError) as error:
        raise UnavailableError(
            "no Ray cluster to join; submit this with `ray job submit`, or set RAY_ADDRESS",
            code="server_unreachable",
        ) from error


def disconnect() -> None:
    """Leave the cluster; from then on Ray prints nothing here."""
    ray.shutdown()


def waits_for(status: ServeStatus, app: str) -> str | None:
    """What a job that wants the application still waits for; None once it runs.

    Raises:
        NotFoundError: It is not there (``application_not_found``).
        UnavailableError: It has failed (``deploy_failed``).
    """
    overview = status.applications.get(app)
    if overview is None:
        raise _no_application(status, app)
    expect_starting(ApplicationState(status=overview.status, message=_message(overview)))
    if overview.status == "RUNNING":
        return None
    return f"it is {overview.status.value} ({_deployments(overview)})"


def _no_application(status: ServeStatus, app: str) -> NotFoundError:
    if not status.proxies and not status.applications:
        found = "Ray Serve does not run on this cluster"
    else:
        names = ", ".join(sorted(status.applications)) or "none"
        found = f"this cluster serves no application {app!r} (applications: {names})"
    return NotFoundError(
        f"{found}; {START}, or name another application with --app", code="application_not_found"
    )


def _message(overview: ApplicationStatusOverview) -> str:
    """Ray's words on the application and, where they say more, on its deployments."""
    parts = [overview.message, *(one.message for one in overview.deployments.values())]
    return " ".join(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _deployments(overview: ApplicationStatusOverview) -> str:
    """Each deployment with the states of its replicas, and what Ray says of it."""
    return "; ".join(
        f"{name} {one.status.value}, replicas {_counts(one.replica_states)}"
        + (f", Ray says: {one.message.strip()}" if one.message.strip() else "")
        for name, one in sorted(overview.deployments.items())
    )


def _counts(states: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items()) or "none"


def wait_running(
    app: str,
    timeout_s: float,
    *,
    status: Callable[[], ServeStatus] = serve.status,
    resources: Callable[[], Mapping[str, float]] = ray.available_resources,
) -> None:
    """Return once the application runs.

    Args:
        app: Its name.
        timeout_s: How long to wait while it starts; 0 to look once.
        status: What Serve says.
        resources: What the cluster has to spare.

    Raises:
        NotFoundError: It is not there (``application_not_found``).
        UnavailableError: It has failed (``deploy_failed``), or did not run in time
            (``not_ready``, saying what it waits for).
    """
    deadline = time.monotonic() + timeout_s
    while (waiting := waits_for(status(), app)) is not None:
        if time.monotonic() + POLL_S > deadline:
            spare = ", ".join(f"{n:g} {name}" for name, n in _countable(resources())) or "nothing"
            raise UnavailableError(
                f"application {app!r} does not run after {timeout_s:g} s: {waiting}. The cluster "
                f"has {spare} to spare; add what is missing, ask for less, or wait longer with "
                f"--timeout",
                code="not_ready",
            )
        time.sleep(POLL_S)


def _countable(resources: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, resources[name]) for name in ("CPU", "GPU") if name in resources]


class JoinedApplication:
    """A running application as a job driver calls it, from plain threads.

    Args:
        app: Its name.
        patience_s: How long a call is repeated while the ingress is restarted.
    """

    def __init__(self, app: str, patience_s: float) -> None:
        ingress = serve.get_app_handle(app)
        # By value, Serve would send results over gRPC, whose limit is 4 MiB.
        self._describe = ingress.describe.options(_by_reference=True)
        self._tokenize = ingress.tokenize.options(_by_reference=True)
        self._patience_s = patience_s
        self.replicas: DeploymentHandle = serve.get_deployment_handle(REPLICA_DEPLOYMENT, app)

    def offer(self) -> Offer:
        """What it serves.

        Raises:
            UnavailableError: No replica was proven for as long as ``patience_s``.
        """
        offer: Offer = self._patiently(self._describe.remote)
        return offer

    def tokenize(
        self, rows: Sequence[InputRow], identity: CaptureIdentity, first_index: int
    ) -> list[RowRecord]:
        """Token ids of consecutive rows, in calls of bounded size.

        Raises:
            ConflictError: It serves another model by now.
            UnavailableError: Nobody answered for as long as ``patience_s``.
        """
        records: list[RowRecord] = []
        for at in range(0, len(rows), TOKENIZE_ROWS):
            part = list(rows[at : at + TOKENIZE_ROWS])
            records += self._patiently(self._tokenize.remote, part, identity, first_index + at)
        return records

    def _patiently(self, call: Callable[..., DeploymentResponse[Any]], *args: Any) -> Any:
        retrying = Retrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_after_delay(self._patience_s),
            wait=wait_random_exponential(multiplier=0.5, max=5.0),
            reraise=True,
        )
        return retrying(_answer, call, *args)


def _answer(call: Callable[..., DeploymentResponse[Any]], *args: Any) -> Any:
    response = call(*args)
    try:
        return response.result(timeout_s=CALL_TIMEOUT_S)
    except TimeoutError as error:
        response.cancel()
        raise UnavailableError(
            f"the ingress did not answer within {CALL_TIMEOUT_S:g} s", code="deadline_exceeded"
        ) from error
    except (RayError, BackPressureError, DeploymentUnavailableError) as error:
        raise translate(error, "tokenize_rows") from error
