"""The client. :mod:`.blocking` wraps it for code without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self

import httpx
from obstore.store import MemoryStore

from wllm_ray.answers import rows_failed
from wllm_ray.client.connection import Connection
from wllm_ray.client.job import run_over_http
from wllm_ray.client.ready import wait_ready
from wllm_ray.client.remote import Remote, check_answer
from wllm_ray.coordinator import FlowLimits
from wllm_ray.dataset.reading.reader import ActivationDataset, load_dataset
from wllm_ray.dataset.stores.remote import ObjectStore
from wllm_ray.dataset.stores.store import Root, open_store
from wllm_ray.digest import canonical_json
from wllm_ray.errors import CaptureError, IntegrityError, InvalidInputError
from wllm_ray.inputs import Input, as_list, input_rows
from wllm_ray.job.run import RunOptions
from wllm_ray.job.source import SourcePlan
from wllm_ray.plan import ShardLimits
from wllm_ray.positions import PositionLike
from wllm_ray.records import InputRow
from wllm_ray.requests import Selection, select
from wllm_ray.schema import ActivationResponse, ExtractionSchema, ModelCard, StorageOptions
from wllm_ray.tokens import make_records
from wllm_ray.wire import JSON

__all__ = ["AsyncWLLMClient"]


class AsyncWLLMClient:
    """Talks to one application. Use it as an async context manager, or call :meth:`close`.

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
        self._artifact_root = artifact_root
        self._connection = Connection(
            base_url,
            api_key=api_key,
            timeout_s=timeout,
            patience_s=patience,
            transport=transport,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def wait_until_ready(self, timeout: float = 600.0) -> None:  # noqa: ASYNC109 (an API)
        """Return once at least one replica has passed its self-test.

        Raises:
            UnavailableError: Not within ``timeout`` seconds; the message says what was seen last.
        """
        await wait_ready(self._connection, timeout)

    async def models(self) -> list[ModelCard]:
        """What is served, with the identity of its weights."""
        return await self._connection.models()

    async def extract_activations(  # noqa: PLR0913 (one keyword per thing that can be asked)
        self,
        model: str,
        inputs: Iterable[Input],
        row_ids: Iterable[str] | None = None,
        metadata: Iterable[Mapping[str, Any]] | None = None,
        *,
        layers: int | Sequence[int] | None = None,
        site: str = "block",
        sites: str | Sequence[str] | None = None,
        position: PositionLike = "last_prompt",
        batch_size: int | Literal["auto"] = "auto",
        storage: StorageOptions | None = None,
        persist: bool = False,
        dataset_id: str | None = None,
    ) -> ActivationDataset:
        """Capture activations of some inputs.

        Args:
            model: The served model's name.
            inputs: Each a string, a list of messages, or token ids (a list or integer array).
                Or rows as in a file, ``{"id": …, "prompt": …, "metadata": …}``, which carry their
                own ids and metadata.
            row_ids: One id per input; default ``row-000000`` and so on.
            metadata: One JSON-like mapping per input.
            layers: Zero-based decoder blocks that ``site`` applies to, or one of them.
            site: The site kind for ``layers``; ``block`` is ``resid_post``.
            sites: Further hook sites by name, for example ``L12_resid_post``, or one of them.
            position: Which tokens of each input: ``last_prompt``, ``first``, ``all_prompt`` (each
                of them), ``mean_prompt`` (their mean), or ``{"index": [0, -1]}``, where negative
                indices count from the end. The dataset's ``offsets`` say which feature rows are
                an input's.
            batch_size: Rows per chunk.
            storage: How the dataset is stored: rows per shard, layout, format, dtype, traces.
            persist: Have the application commit the dataset to its storage root, and load it from
                there. Otherwise it is built on this machine, in memory.
            dataset_id: The dataset's id; default: made from what is asked.

        Returns:
            The dataset. Rows that cannot be run are in its ``failures``.

        Raises:
            InvalidInputError: The inputs, sites or position cannot be understood.
            RowsFailedError: Rows failed for reasons that may pass; call again.
            UnavailableError: Nobody answered for as long as ``patience``.
        """
        if persist and self._artifact_root is None:
            raise InvalidInputError(
                "persist=True needs artifact_root: the application's storage root as this machine "
                "sees it. Pass it to the client, or use persist=False to get the dataset in memory",
                code="invalid_argument",
            )
        storage = StorageOptions.of(storage)
        if storage.full_trace and not persist:
            raise InvalidInputError(
                "full_trace keeps traces on the application's storage root; ask for it with "
                "persist=True",
                code="invalid_argument",
            )
        rows = await asyncio.to_thread(input_rows, inputs, row_ids, metadata)
        card = await self._connection.model(model)
        selection = select(
            card,
            layers=as_list("layers", int, layers),
            site=site,
            sites=as_list("sites", str, sites),
            position=position,
        )
        if persist:
            options = {"batch_size": batch_size, "dataset_id": dataset_id} | asdict(storage)
            options["persistence"] = "full_trace" if options.pop("full_trace") else "dataset"
            return await self._persisted(card, selection, rows, options)
        schema = await self._connection.get("/v1/extraction-schema", ExtractionSchema)
        # The server's own limits, so that it would give its dataset the same content digest.
        limits = ShardLimits(schema.max_rows_per_shard, schema.max_bytes_per_shard)
        plan = SourcePlan(card, selection, lambda: rows, dataset_id, limits, storage=storage)
        remote = Remote(self._connection, card, selection, schema)
        return await self._in_memory(remote, plan, rows, batch_size)

    async def _in_memory(
        self,
        remote: Remote,
        plan: SourcePlan,
        rows: list[InputRow],
        batch_size: int | Literal["auto"],
    ) -> ActivationDataset:
        store = ObjectStore(MemoryStore(), "memory://")
        options = RunOptions(batch_size, flow=FlowLimits(attempts=1))
        outcome = await run_over_http(remote, store, plan, options)
        if outcome.transient:
            records = list(make_records(rows, plan.selection.identity))
            raise rows_failed(records, outcome.transient)
        return await asyncio.to_thread(load_dataset, store, outcome.spec.dataset_id)

    async def _persisted(
        self,
        card: ModelCard,
        selection: Selection,
        rows: list[InputRow],
        options: Mapping[str, object],
    ) -> ActivationDataset:
        request = {
            "model": card.id,
            "rows": [{"id": row.id, "metadata": row.metadata, **row.content} for row in rows],
            "sites": selection.identity.sites,
            "position": selection.position,
            **options,
        }
        answer = await self._connection.post(
            "/v1/activation-datasets", canonical_json(request), accept=JSON
        )
        response = self._connection.parse(answer, ActivationResponse)
        records = list(make_records(rows, selection.identity))
        check_answer(records, response, selection)
        return await asyncio.to_thread(self._load, response)

    def _load(self, response: ActivationResponse) -> ActivationDataset:
        reference = response.dataset
        if reference is None:
            raise CaptureError(
                "expected a reference to a committed dataset, found none in the answer",
                code="protocol_error",
            )
        assert self._artifact_root is not None, "checked before anything was sent"
        store = open_store(self._artifact_root)
        dataset = load_dataset(store, reference.dataset_id)
        found = dataset.manifest.manifest_sha256
        if found != reference.manifest_sha256:
            raise IntegrityError(
                f"the application committed {reference.dataset_id!r} with manifest "
                f"{reference.manifest_sha256}, but {store.uri} holds {found}; artifact_root is "
                f"not the application's storage root, or holds an older copy",
                code="digest_mismatch",
            )
        return dataset
