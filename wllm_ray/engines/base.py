"""The interface that all engines in this process share: a model, its tokenizer, what is read.

A low-level engine (:mod:`wllm_ray.capture.protocol`) runs token ids. Here inputs become rows and
token ids, rows are cut into calls, and what comes back is aligned with the rows: in memory, or as
a dataset on a storage root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from wllm_ray.capture.protocol import Engine
from wllm_ray.dataset.stores.store import Root, open_store
from wllm_ray.engines.activations import Activations, put_together
from wllm_ray.engines.auto_batch import AutoBatch, Batching, batching_of
from wllm_ray.engines.calls import CALLS_AT_ONCE, Calls, write_dataset
from wllm_ray.engines.options import refuse
from wllm_ray.engines.stream import ReceiptQueue, ShardStream, Written
from wllm_ray.engines.thread import EngineThread
from wllm_ray.engines.wanted import Sites, Wanted, site_names
from wllm_ray.inputs import Input, as_list, input_rows
from wllm_ray.job.source import RowSource, SourcePlan, spec_of
from wllm_ray.positions import PositionLike
from wllm_ray.records import EngineDescription
from wllm_ray.requests import Selection
from wllm_ray.schema import StorageOptions
from wllm_ray.sites import HookSite
from wllm_ray.tokens import Tokenizer

__all__ = ["ActivationEngine", "Loaded", "Sequences"]

Loaded: TypeAlias = tuple[Engine, Tokenizer]
# How many rows go into one call.
Sequences: TypeAlias = int | Literal["auto"] | AutoBatch

_EXTRACT_ARGUMENTS = ("inputs", "sites", "position", "row_ids", "metadata")


class ActivationEngine:
    """Captures activations of inputs in this process. A context manager.

    Args:
        load: Loads the model and its tokenizer; called once what is asked can be read.
        sites: What to read where a call does not say: hook sites, by name or as
            :class:`~wllm_ray.sites.HookSite`, or one of them. Default: the stream after the last
            block.
        layers: Zero-based blocks that ``site`` applies to; with ``sites``, both are read.
        site: The site kind for ``layers``; ``block`` is ``resid_post``.
        position: Which tokens of each input: ``last_prompt``, ``first``, ``all_prompt``,
            ``mean_prompt``, or ``{"index": [0, -1]}``.

    Raises:
        InvalidInputError: A site, layer or position that cannot be.
        NotOfferedError: One that this model does not have or that is not captured on it.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        sites: Sites | None = None,
        *,
        layers: int | Sequence[int] | None = None,
        site: str = "block",
        position: PositionLike = "last_prompt",
    ) -> None:
        wanted = Wanted(site_names(sites), position, as_list("layers", int, layers), site)
        self._engine, self._tokenizer = load()
        try:
            self._selection = wanted.on(self._engine.description)
        except BaseException:
            self._engine.close()
            raise
        self._batching: Batching = batching_of("auto", self._engine.description)
        self._thread = EngineThread("wllm-engine")

    @property
    def description(self) -> EngineDescription:
        """What this engine is: model, sites on offer, versions, fingerprint, self-test."""
        return self._engine.description

    @property
    def sites(self) -> tuple[HookSite, ...]:
        """What is read where a call does not say."""
        return self._selection.sites

    @property
    def position(self) -> str:
        """Where it is read where a call does not say; canonical."""
        return self._selection.position

    def set_active_sites(self, sites: Sites, position: PositionLike | None = None) -> None:
        """Read these from now on; the model stays loaded.

        Args:
            sites: Hook sites, or one of them.
            position: Default: as before.

        Raises:
            InvalidInputError: A site or position that cannot be; what was set before stays.
            NotOfferedError: One that is not captured on this model; what was set before stays.
        """
        self._selection = self._select(sites, position)

    def set_sequences_per_call(self, sequences: Sequences) -> None:
        """Cut inputs into calls of so many rows from now on; results stay what they are.

        To the bit in class ``bitwise``, within the measured bound in class ``tolerance``.

        Args:
            sequences: Rows per call; ``auto`` for what the memory that is available now allows; or
                an :class:`AutoBatch` of one's own.

        Raises:
            InvalidInputError: None of these.
        """
        self._batching = batching_of(sequences, self.description)

    def measure_batches(self, budget_bytes: int | None = None) -> AutoBatch:
        """Measure what calls take in memory, and size them by it from now on.

        Args:
            budget_bytes: What calls may take together; default: a quarter of the memory that is
                available now.
        """
        measured = AutoBatch.measure(self._engine, budget_bytes=budget_bytes)
        self._batching = measured
        return measured

    def extract(
        self,
        inputs: Iterable[Input],
        sites: Sites | None = None,
        position: PositionLike | None = None,
        *,
        row_ids: Iterable[str] | None = None,
        metadata: Iterable[Mapping[str, Any]] | None = None,
        **further: Any,
    ) -> Activations:
        """Capture activations of some inputs; works in a notebook, too.

        Args:
            inputs: Each a string, a list of messages, or token ids (a list or an integer array).
                Or rows as in a file, ``{"id": …, "prompt": …, "metadata": …}``, which carry their
                own ids and metadata.
            sites: Default: the active ones.
            position: Default: the active one.
            row_ids: One id per input; default ``row-000000`` and so on.
            metadata: One JSON-like mapping per input.
            further: There is nothing more; the error says what to do instead.

        Returns:
            The activations. Rows that cannot be run are in their ``failures``.

        Raises:
            InvalidInputError: The inputs, sites or position cannot be understood; nothing was run.
            NotOfferedError: Something that is not captured here.
            CaptureError: The engine failed.
        """
        return self._thread.run(
            self.extract_async(
                inputs, sites, position, row_ids=row_ids, metadata=metadata, **further
            )
        )

    async def extract_async(
        self,
        inputs: Iterable[Input],
        sites: Sites | None = None,
        position: PositionLike | None = None,
        *,
        row_ids: Iterable[str] | None = None,
        metadata: Iterable[Mapping[str, Any]] | None = None,
        **further: Any,
    ) -> Activations:
        """As :meth:`extract`; cancelling the awaiting task frees what the engine holds for it."""
        refuse(further, _EXTRACT_ARGUMENTS)
        calls = self._calls(self._select(sites, position), self._batching)
        rows = await asyncio.to_thread(input_rows, inputs, row_ids, metadata)
        records = await asyncio.to_thread(calls.tokenize, rows)
        chunks = await calls.capture(records)
        return await asyncio.to_thread(
            put_together, records, chunks, calls.selection, self.description
        )

    def stream_to_disk(
        self,
        inputs: Iterable[Input] | RowSource,
        root: Root,
        dataset_id: str | None = None,
        *,
        storage: StorageOptions | None = None,
        batch_size: Sequences | None = None,
        row_ids: Iterable[str] | None = None,
        metadata: Iterable[Mapping[str, Any]] | None = None,
    ) -> ShardStream:
        """Write a dataset of the active sites, shard by shard; yields a receipt for each.

        The dataset is the one that an application would make of the same rows, to the content
        digest where the fingerprint is the same.

        Args:
            inputs: As for :meth:`extract`; or what yields rows each time it is called, such as a
                :class:`~wllm_ray.job.rows_file.RowsFile`, so that they never lie in memory all at
                once.
            root: Where datasets lie: a path, ``s3://…``, ``gs://…``, ``az://…``, or an open store.
            dataset_id: The dataset's id; default: made from what is asked.
            storage: How the dataset is stored: rows per shard, layout, format, dtype, traces.
            batch_size: As for :meth:`set_sequences_per_call`; default: what is set.
            row_ids: One id per input.
            metadata: One JSON-like mapping per input.

        Raises:
            InvalidInputError: Something cannot be understood; nothing was run.
        """
        selection, batching = self._selection, self._batching
        if batch_size is not None:
            batching = batching_of(batch_size, self.description)
        plan = SourcePlan(
            self.description,
            selection,
            _source(inputs, row_ids, metadata),
            dataset_id,
            storage=StorageOptions.of(storage),
        )
        spec, store = spec_of(plan), open_store(root)

        async def write(receipts: ReceiptQueue) -> Written:
            calls = self._calls(plan.captured, batching)
            return await write_dataset(calls, store, plan, spec, receipts)

        return ShardStream(spec, write, self._thread)

    def check(self) -> None:
        """Return at once while the engine is alive.

        Raises:
            CaptureError: It is dead, closed or stuck (``engine_dead``).
        """
        self._engine.check()

    def close(self) -> None:
        """Stop what runs and free the model; does nothing the second time."""
        if self._thread.is_running:
            try:
                self._thread.stop()
            finally:
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _calls(self, selection: Selection, batching: Batching) -> Calls:
        window = asyncio.Semaphore(CALLS_AT_ONCE)
        return Calls(self._engine, self._tokenizer, selection, batching, window)

    def _select(self, sites: Sites | None, position: PositionLike | None) -> Selection:
        names = self._selection.identity.sites if sites is None else site_names(sites)
        where = self._selection.position if position is None else position
        return Wanted(None if names is None else list(names), where).on(self.description)


def _source(
    inputs: Iterable[Input] | RowSource,
    row_ids: Iterable[str] | None,
    metadata: Iterable[Mapping[str, Any]] | None,
) -> RowSource:
    """What yields the rows as often as they are needed."""
    if callable(inputs):
        return inputs
    rows = input_rows(inputs, row_ids, metadata)
    return lambda: rows
