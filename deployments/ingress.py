"""The ingress: HTTP and handle calls in, work out to the replicas. Runs on a CPU."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.args import AppArgs
from deployments.backend import REPLICA_DEPLOYMENT, RayBackend
from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.dataset.stores.probing import expect_create_only
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import NotOfferedError
from wllm_ray.extraction import ExtractionService, Offer
from wllm_ray.http.api import build_api
from wllm_ray.records import (
    CaptureIdentity,
    EngineDescription,
    InputRow,
    ModelIdentity,
    RowRecord,
)
from wllm_ray.requests import read_request
from wllm_ray.schema import ActivationRequest, DatasetReference

__all__ = ["Ingress"]

READINESS_PERIOD_S = 2.0

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """Tokenises, plans and coordinates; never touches an activation on its way to a dataset.

    Args:
        args: The application's arguments.
        identity: The model, resolved once for all replicas.
        replicas: Handle of the activation deployment.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits constructors
        self, args: AppArgs, identity: ModelIdentity, replicas: DeploymentHandle
    ) -> None:
        self._args = args
        self._backend = RayBackend(replicas, args.storage_root)
        self._identity = identity
        self._tokenizer = await asyncio.to_thread(
            TransformersTokenizer, args.model, identity, trust_remote_code=args.trust_remote_code
        )
        store = None if args.storage_root is None else open_store(args.storage_root)
        if store is not None:
            # Retried tasks, and applications that share the root, write at the same time.
            await asyncio.to_thread(expect_create_only, store)
        self._service: ExtractionService[Any] = ExtractionService(
            self._backend, self._tokenizer, store=store, limits=args.limits()
        )
        self._ready = False
        self._watcher = asyncio.get_running_loop().create_task(self._watch_replicas())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The HTTP application, built in the replica."""
        return build_api(
            self._service,
            is_ready=lambda: self._ready,
            api_key=self._args.api_key(),
            max_body_bytes=self._args.max_body_bytes,
            max_concurrent_requests=self._args.max_concurrent_requests,
        )

    async def extract(self, request: ActivationRequest | dict[str, Any]) -> DatasetReference:
        """Capture a dataset, for callers inside the cluster.

        Args:
            request: With persistence ``dataset``; a dictionary is validated first.

        Raises:
            InvalidInputError: The request cannot be understood.
            NotOfferedError: It wants its bytes inline (code ``persistence_not_offered``).
        """
        parsed = read_request(request)
        if parsed.persistence == "none":
            raise NotOfferedError(
                "a handle call answers with a reference, never with the bytes; ask for "
                "persistence `dataset`, or use HTTP for inline results",
                code="persistence_not_offered",
            )
        response = await self._service.extract_dataset(parsed)
        assert response.dataset is not None, "a committed dataset has a reference"
        return response.dataset

    async def describe(self) -> Offer:
        """What this application is, for job drivers.

        Raises:
            UnavailableError: No replica has passed its self-test yet.
        """
        return self._service.offer()

    async def tokenize(
        self, rows: list[InputRow], identity: CaptureIdentity, first_index: int
    ) -> list[RowRecord]:
        """Token ids of consecutive rows, for job drivers; see `ExtractionService.tokenize`."""
        return await asyncio.to_thread(self._service.tokenize, rows, identity, first_index)

    async def _watch_replicas(self) -> None:
        """Keep readiness up to date from the controller, which never waits for the model."""
        app = serve.get_replica_context().app_name
        while True:
            try:
                self._ready = await self._look_for_replicas(app)
            except Exception as error:  # noqa: BLE001 (a watcher that ends would freeze readiness)
                self._ready = False
                logger.warning("readiness is unknown: %s", type(error).__name__)
            await asyncio.sleep(READINESS_PERIOD_S)

    async def _look_for_replicas(self, app: str) -> bool:
        running = await asyncio.to_thread(_has_running_replica, app)
        if running and self._service.description is None:
            self._service.description = await self._describe()
        return running and self._service.description is not None

    async def _describe(self) -> EngineDescription | None:
        """The replicas' description, unless their files differ from what this ingress reads."""
        description = await self._backend.describe()
        if (description.model, description.tokenizer) == (self._identity, self._tokenizer.identity):
            return description
        logger.error("the replica's model or tokenizer files differ from the ingress's own")
        return None


def _has_running_replica(app: str) -> bool:
    """Whether a replica has finished its constructor, which ends with the self-test."""
    status = serve.status().applications.get(app)
    deployment = status.deployments.get(REPLICA_DEPLOYMENT) if status else None
    return bool(deployment and deployment.replica_states.get("RUNNING", 0))
