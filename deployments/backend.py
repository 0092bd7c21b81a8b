"""Runs chunks on replicas and writes through Ray tasks: the Ray side of the library's Backend.

Everything that this package knows about Serve's developer API and about Ray's exceptions is here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray import ObjectRef
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OwnerDiedError,
    RayError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.tasks import commit_manifest, stage_shard
from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.writing.writer import StageResult
from wllm_ray.errors import CaptureError, StorageError, UnavailableError, WLLMError
from wllm_ray.plan import Shard
from wllm_ray.records import CapturedChunk, CaptureTask, EngineDescription

__all__ = ["REPLICA_DEPLOYMENT", "RayBackend", "translate"]

REPLICA_DEPLOYMENT = "ActivationReplica"

_REPLICA_GONE = (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    OwnerDiedError,
    WorkerCrashedError,
    DeploymentUnavailableError,
    BackPressureError,
)


def translate(error: Exception, stage: str) -> WLLMError:
    """Foreign exceptions become ours here; the cause is kept, its text is not shown."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, _REPLICA_GONE) or getattr(cause, "code", None) == "engine_dead":
        return UnavailableError(
            f"a replica or its data went away ({type(cause).__name__})",
            code="replica_lost",
            stage=stage,
        )
    if isinstance(cause, WLLMError):
        return cause
    kind = StorageError if stage in {"stage_shard", "commit_manifest"} else CaptureError
    return kind(f"{stage} failed with {type(cause).__name__}; the log has the cause", stage=stage)


def _suspect(error: WLLMError, *, alone: bool) -> WLLMError:
    """A death with nothing else in flight says something about the chunk."""
    if not alone or error.code != "replica_lost":
        return error
    return UnavailableError(error.message, code="engine_died_alone", stage=error.stage)


class RayBackend:
    """Implements :class:`wllm_ray.backend.Backend`; payloads are object references.

    Args:
        replicas: Handle of the activation deployment.
        storage_root: Where datasets are written; may be None where none are.
    """

    def __init__(self, replicas: DeploymentHandle, storage_root: str | None) -> None:
        # By value, Serve would send results over gRPC, whose limit is 4 MiB.
        self._describe = replicas.describe.options(_by_reference=True)
        self._capture = replicas.capture.options(stream=True, _by_reference=True)
        self._root = storage_root

    async def describe(self) -> EngineDescription:
        """Ask any replica what it runs; waits until there is one."""
        description: EngineDescription = await self._describe.remote()
        return description

    async def capture(self, task: CaptureTask, *, alone: bool) -> ObjectRef[CapturedChunk]:
        """Run a chunk on a replica; the arrays stay in the object store.

        Raises:
            UnavailableError: The replica went away; another attempt may succeed.
            WLLMError: What the engine itself said.
        """
        response = self._capture.remote(task, alone)
        its_turn = False
        try:
            references = await response._to_object_ref_gen()  # noqa: SLF001 (Serve's only way)
            await (await anext(references))
            its_turn = True
            await (await anext(references))
            chunk: ObjectRef[CapturedChunk] = await anext(references)
        except (RayError, BackPressureError, DeploymentUnavailableError) as error:
            raise _suspect(translate(error, "capture"), alone=alone and its_turn) from error
        except BaseException:
            response.cancel()
            raise
        return chunk

    async def fetch(self, payload: ObjectRef[CapturedChunk]) -> CapturedChunk:
        """Bring a chunk into this process; its arrays stay in shared memory, read-only."""
        try:
            chunk: CapturedChunk = await payload
        except RayError as error:
            raise translate(error, "capture") from error
        return chunk

    async def stage(
        self, spec: DatasetSpec, shard: Shard, payloads: Sequence[ObjectRef[CapturedChunk]]
    ) -> StageResult:
        """Write one shard in a Ray task."""
        try:
            result: StageResult = await stage_shard.remote(self._root, spec, shard, list(payloads))
        except (RayError, TaskCancelledError) as error:
            raise translate(error, "stage_shard") from error
        return result

    async def commit(self, dataset_id: str) -> Manifest:
        """Create the manifest in a Ray task."""
        try:
            manifest: Manifest = await commit_manifest.remote(self._root, dataset_id)
        except RayError as error:
            raise translate(error, "commit_manifest") from error
        return manifest
