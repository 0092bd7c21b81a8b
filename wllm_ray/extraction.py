"""One request, from rows to inline features or a committed dataset.

The same for HTTP and handles: ``parse_rows → tokenize_rows → plan_chunks → capture →
stage_shard → commit_manifest``. What runs a chunk, stages a shard and commits is a
:class:`~wllm_ray.backend.Backend`, so this module knows neither Ray nor an engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from wllm_ray.answers import dataset_answer, expect_fits_inline, inline_answer, rows_failed
from wllm_ray.backend import Backend, capturer
from wllm_ray.coordinator import Coordinator, FlowLimits
from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.spec import build_spec
from wllm_ray.errors import (
    ConflictError,
    OverloadedError,
    StorageError,
    UnavailableError,
)
from wllm_ray.job.run import Job, JobOutcome, RunOptions, run_job
from wllm_ray.job.source import rows_of_shard, shards_of
from wllm_ray.job.summary import permanent_failures
from wllm_ray.plan import ShardLimits
from wllm_ray.records import CaptureIdentity, EngineDescription, InputRow, RowFailure, RowRecord
from wllm_ray.requests import Prepared, prepare, traced
from wllm_ray.schema import ActivationRequest, ActivationResponse
from wllm_ray.tokens import Tokenizer, TokenLimits, tokenize_rows
from wllm_ray.wire import Inline, expect_one_width

__all__ = ["ExtractionLimits", "ExtractionService", "Offer"]

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True)
class ExtractionLimits:
    """Bounds that the operator sets.

    Attributes:
        max_inline_bytes: Features of one inline answer, as float32.
        max_jobs: Datasets that are made at once. Their requests may have ended: a caller that
            leaves does not stop the work.
        shard: Upper bounds of one shard.
        flow: Window, deadlines and retries.
    """

    max_inline_bytes: int = 64 * 1024 * 1024
    max_jobs: int = 64
    shard: ShardLimits = field(default_factory=ShardLimits)
    flow: FlowLimits = field(default_factory=FlowLimits)


@dataclass(frozen=True, slots=True)
class Offer:
    """What an application tells those who run jobs on its replicas themselves.

    Attributes:
        description: The engine.
        limits: The operator's bounds.
        storage_root: Where the application commits datasets, or None.
    """

    description: EngineDescription
    limits: ExtractionLimits
    storage_root: str | None


class ExtractionService(Generic[Payload]):
    """Answers activation requests for one served model.

    Args:
        backend: Runs the work.
        tokenizer: The served model's tokenizer.
        store: The storage root, or None where only inline results are offered.
        limits: The operator's bounds.

    Attributes:
        description: The engine, once a replica has passed its self-test; set by the owner.
        limits: As given.
    """

    def __init__(
        self,
        backend: Backend[Payload],
        tokenizer: Tokenizer,
        *,
        store: Store | None,
        limits: ExtractionLimits | None = None,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._store = store
        self.limits = limits or ExtractionLimits()
        self._jobs: dict[str, tuple[DatasetSpec, asyncio.Task[JobOutcome]]] = {}
        self.description: EngineDescription | None = None

    @property
    def has_store(self) -> bool:
        """Whether datasets can be persisted here."""
        return self._store is not None

    def require_ready(self) -> EngineDescription:
        """The engine's description.

        Raises:
            UnavailableError: No replica has passed its self-test yet.
        """
        if self.description is None:
            raise UnavailableError(
                "no replica has passed its self-test yet; wait for /readyz", code="not_ready"
            )
        return self.description

    def offer(self) -> Offer:
        """What this application is, for those who run jobs on its replicas themselves.

        Raises:
            UnavailableError: Not ready.
        """
        root = None if self._store is None else self._store.uri
        return Offer(self.require_ready(), self.limits, root)

    def tokenize(
        self, rows: Sequence[InputRow], identity: CaptureIdentity, first_index: int
    ) -> list[RowRecord]:
        """Turn rows of a job into token ids.

        Args:
            rows: Consecutive rows.
            identity: As the job was begun with.
            first_index: Index of the first row among all rows of the job.

        Raises:
            ConflictError: The job was begun on another model or tokenizer (``mixed_fingerprints``).
            UnavailableError: Not ready.
        """
        served = self.require_ready()
        _expect_same_model(identity, served)
        limits = TokenLimits(served.max_model_len, served.vocab_size)
        return tokenize_rows(rows, self._tokenizer, identity, limits, first_index=first_index)

    async def extract_inline(
        self, request: ActivationRequest, *, as_one_array: bool = False
    ) -> Inline:
        """Capture and answer with the features themselves.

        Args:
            request: With persistence ``none``.
            as_one_array: The caller wants them stacked, so that sites must be of one width.

        Raises:
            InvalidInputError: The request cannot be understood.
            NotOfferedError: It asks for what is not offered here.
            TooLargeError: The answer would be over its bound.
            UnavailableError: Not ready.
        """
        prepared = await self._prepare(request)
        if as_one_array:
            expect_one_width(prepared.selection.identity.sites, prepared.selection.site_widths)
        expect_fits_inline(prepared, self.limits.max_inline_bytes)
        capture = capturer(self._backend, prepared.selection)
        coordinator = Coordinator(capture, limits=self.limits.flow, isolates=True)
        started = time.perf_counter()
        captured = await coordinator.capture_rows(0, prepared.rows, request.batch_size)
        chunks = [await self._backend.fetch(payload) for payload in captured.payloads]
        prepared.timings["capture_s"] = time.perf_counter() - started
        return await asyncio.to_thread(inline_answer, prepared, chunks, captured.failures)

    async def extract_dataset(self, request: ActivationRequest) -> ActivationResponse:
        """Capture, stage and commit; the work goes on if the caller leaves.

        Raises:
            InvalidInputError: The request cannot be understood.
            ConflictError: The dataset id stands for something else.
            RowsFailedError: Transient failures are left; what was staged stays.
            StorageError: No storage root is configured, or it failed.
        """
        prepared = await self._prepare(request)
        store = self._require_store()
        spec = self._spec(prepared)
        started = time.perf_counter()
        # A caller that leaves must not take the commit with it.
        outcome = await asyncio.shield(self._start(spec, prepared, store))
        prepared.timings["dataset_s"] = time.perf_counter() - started
        if outcome.manifest is None:
            raise rows_failed(prepared.rows, outcome.transient)
        failures = await asyncio.to_thread(_failures, store, outcome)
        return dataset_answer(prepared, outcome.manifest, failures, len(outcome.superseded))

    def _require_store(self) -> Store:
        if self._store is None:
            raise StorageError(
                "persistence `dataset` needs a storage root and this application has none; "
                "set `storage_root` in its arguments, or ask for persistence `none`",
                code="storage_not_configured",
            )
        return self._store

    async def _prepare(self, request: ActivationRequest) -> Prepared:
        description = self.require_ready()
        return await asyncio.to_thread(prepare, request, description, self._tokenizer)

    def _spec(self, prepared: Prepared) -> DatasetSpec:
        return build_spec(
            prepared.description,
            prepared.selection.identity,
            prepared.rows,
            site_widths=prepared.selection.site_widths,
            dataset_id=prepared.request.dataset_id,
            limits=self.limits.shard,
            storage=prepared.request.storage,
        )

    def _start(
        self, spec: DatasetSpec, prepared: Prepared, store: Store
    ) -> asyncio.Task[JobOutcome]:
        """Start the job, or attach to the one that runs for the same dataset already."""
        running = self._jobs.get(spec.dataset_id)
        if running is not None:
            if running[0] != spec:
                raise ConflictError(
                    f"dataset {spec.dataset_id!r} is being written with another request; "
                    "wait for it, or choose another dataset_id"
                )
            return running[1]
        if len(self._jobs) >= self.limits.max_jobs:
            raise OverloadedError(
                f"{len(self._jobs)} datasets are being made, which is the bound; try again later"
            )
        # Without a context of its own, the task would be cancelled with the request.
        task = asyncio.get_running_loop().create_task(
            self._run(spec, prepared, store), context=contextvars.Context()
        )
        self._jobs[spec.dataset_id] = (spec, task)
        task.add_done_callback(lambda done: self._finish(spec.dataset_id, done))
        return task

    def _finish(self, dataset_id: str, task: asyncio.Task[JobOutcome]) -> None:
        del self._jobs[dataset_id]
        if not task.cancelled():
            task.exception()  # marks it as seen where nobody waits any more

    async def _run(self, spec: DatasetSpec, prepared: Prepared, store: Store) -> JobOutcome:
        rows, selection = prepared.rows, prepared.selection
        if spec.trace is not None:
            selection = traced(prepared.description, selection)
        job = Job(
            spec=spec,
            shards=lambda done: shards_of(rows, spec, done),
            rows_of=lambda number: rows_of_shard(rows, spec, number),
            capture=capturer(self._backend, selection),
            stage=self._backend.stage,
            commit=self._backend.commit,
            isolates=True,
            options=RunOptions(prepared.request.batch_size, flow=self.limits.flow),
        )
        return await run_job(store, job)


def _expect_same_model(identity: CaptureIdentity, served: EngineDescription) -> None:
    begun = (
        identity.model_revision,
        identity.tokenizer_revision,
        identity.chat_template_sha256,
    )
    tokenizer = served.tokenizer
    if begun != (served.model.revision, tokenizer.revision, tokenizer.chat_template_sha256):
        raise ConflictError(
            f"the job was begun on model revision {identity.model_revision} with tokenizer "
            f"{identity.tokenizer_revision}, and the application now serves "
            f"{served.model.revision} with {tokenizer.revision}; serve the first one again, or "
            f"choose another dataset id",
            code="mixed_fingerprints",
            stage="tokenize_rows",
        )


def _failures(store: Store, outcome: JobOutcome) -> dict[int, RowFailure]:
    found = permanent_failures(store, outcome.spec.dataset_id, outcome.receipts)
    return {index: failure for index, _, failure in found}
