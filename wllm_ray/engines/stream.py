"""A dataset written by an engine in this process, as an iterator of its receipts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest, Receipt
from wllm_ray.engines.thread import EngineThread
from wllm_ray.job.progress import Progress

__all__ = ["ReceiptQueue", "ShardStream", "Written"]

# Receipts that lie there before the consumer has taken the one before them.
AHEAD = 2


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a stream that ended well.

    Attributes:
        manifest: The committed dataset.
        superseded: Shards that were captured here and that another attempt had written by then,
            with other numbers.
    """

    manifest: Manifest
    superseded: Sequence[int]


class ReceiptQueue(Progress):
    """Hands receipts from a job to the consumer of a :class:`ShardStream`.

    The job waits while the consumer is :data:`AHEAD` receipts behind, so that a consumer that
    stops asking stops the work, too.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Mapping[int, Receipt] | None] = asyncio.Queue(AHEAD)

    def planned(self, _spec: DatasetSpec, receipts: Mapping[int, Receipt]) -> None:
        """Hand on what was written before; the first thing that comes, so there is room."""
        self._queue.put_nowait(dict(receipts))

    async def put(self, receipt: Receipt) -> None:
        """Hand on the receipt of a shard that is written now."""
        await self._queue.put({receipt.shard: receipt})

    async def end(self) -> None:
        """Say that no more will come."""
        await self._queue.put(None)

    async def get(self) -> Mapping[int, Receipt] | None:
        """The next receipts, or None at the end."""
        return await self._queue.get()


# Writes the dataset and commits it.
Run: TypeAlias = Callable[[ReceiptQueue], Coroutine[object, object, Written]]


class ShardStream(Iterator[Receipt]):
    """Receipts in shard order; each shard that one stands for is on the storage root.

    Nothing runs before the first receipt is asked for. While the consumer looks at one receipt,
    the next shards are captured and written. Shards that were written by an earlier run come
    first, without being captured again; after the last receipt the dataset is committed and
    ``manifest`` is there. Closing the stream, or letting go of it, stops the work; what is
    written stays, and the same call goes on from there.

    Iterating raises:
        RowsFailedError: Rows failed for reasons that may pass, so nothing was committed.
        StorageError: The storage root refused a write.
        WLLMError: What else ended the job.

    Attributes:
        spec: What is asked: the dataset's id and how the rows fall into shards.
        manifest: The committed dataset, once iteration has ended.
        superseded: Numbers of the shards that were captured here and that another attempt had
            written by then, with other numbers: the first one counts. Once iteration has ended.
    """

    def __init__(self, spec: DatasetSpec, run: Run, thread: EngineThread) -> None:
        self.spec = spec
        self.manifest: Manifest | None = None
        self.superseded: tuple[int, ...] = ()
        # The generator does not refer to this object: letting go of it ends the generator.
        self._receipts = _receipts(run, thread)

    def __next__(self) -> Receipt:
        try:
            return next(self._receipts)
        except StopIteration as end:
            if (written := end.value) is not None:
                self.manifest, self.superseded = written.manifest, tuple(written.superseded)
            raise

    def close(self) -> None:
        """Stop the work, unless it is done."""
        self._receipts.close()


def _receipts(run: Run, thread: EngineThread) -> Generator[Receipt, None, Written]:
    queue = ReceiptQueue()
    job = thread.run(_begin(run, queue))
    early: dict[int, Receipt] = {}
    number = 0
    try:
        while (found := thread.run(queue.get())) is not None:
            early |= found
            while number in early:
                yield early.pop(number)
                number += 1
        # A shard that could not be written leaves a gap; those after it are there all the same.
        yield from (early[later] for later in sorted(early))
        return thread.run(_result(job))
    finally:
        thread.cancel(job)


async def _begin(run: Run, queue: ReceiptQueue) -> asyncio.Task[Written]:
    job = asyncio.get_running_loop().create_task(_run_to_end(run, queue))
    # Marks its exception as seen where nobody asks any more.
    job.add_done_callback(lambda done: done.cancelled() or done.exception())
    return job


async def _run_to_end(run: Run, queue: ReceiptQueue) -> Written:
    """End the queue with the job; when it is cancelled, nobody asks any more."""
    try:
        written = await run(queue)
    except Exception:
        await queue.end()
        raise
    await queue.end()
    return written


async def _result(job: asyncio.Task[Written]) -> Written:
    return await job
