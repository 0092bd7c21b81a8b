"""B-6: staging, verifying and reading against what the machine itself does with the same bytes."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.bench.block_engine import DATASET, BlockEngine, ByteTokenizer, plan_of
from tests.bench.harness import (
    Benchmark,
    Measure,
    Outcome,
    Settings,
    interleaved,
    speed_ratio,
    timed,
)
from tests.bench.pipeline import rows_file, run_worker
from wllm_ray.coordinator import FlowLimits
from wllm_ray.dataset.reading.reader import ActivationDataset, load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import stage_shard
from wllm_ray.job.source import shards_of, spec_of
from wllm_ray.plan import Shard, ShardLimits
from wllm_ray.requests import capture_task
from wllm_ray.tokens import TokenLimits, tokenize_rows

LEAST = 0.8
ROWS_PER_SHARD = 4096
# As a job has them by default.
SHARDS_IN_FLIGHT = FlowLimits().shards_in_flight


def _staging(settings: Settings) -> Outcome:
    shards, width = settings.pick(6, 1), settings.pick(4096, 64)
    stage = _Staging(settings, shards, width)
    data = stage.features.data.cast("B")

    def write() -> float:
        return _write(settings.work / "plain", data, shards)

    def after_writing(call: Callable[[], float]) -> Callable[[], float]:
        """What writes first gets memory that nobody has used for long, which a hypervisor hands
        out slowly: all that writes is timed with memory that a write has just given back.
        """
        return lambda: (write(), call())[1]

    seconds = interleaved(
        settings.pick(9, 1),
        {
            "stage": after_writing(lambda: stage.seconds(SHARDS_IN_FLIGHT)),
            "one after the other": after_writing(lambda: stage.seconds(1)),
            "sha256": timed(lambda: [hashlib.sha256(data).hexdigest() for _ in range(shards)]),
            "write": after_writing(write),
        },
    )
    floor = ("sha256", "write")
    ratio = speed_ratio(seconds, "stage", *floor)
    one = speed_ratio(seconds, "one after the other", *floor)
    return Outcome(
        [
            Measure("staging, of the slower of SHA-256 and write", ratio, "×", least=LEAST),
            Measure("staging, one shard after the other", one, "×"),
            Measure("staging, of SHA-256", speed_ratio(seconds, "stage", "sha256"), "×"),
            Measure("staging, of write", speed_ratio(seconds, "stage", "write"), "×"),
        ],
        {"shards": shards, "rows per shard": ROWS_PER_SHARD, "width": width}
        | {"MiB per shard": len(data) / 2**20, "in flight": SHARDS_IN_FLIGHT},
        seconds,
    )


class _Staging:
    """Whole shards, staged into a new root each time."""

    def __init__(self, settings: Settings, shards: int, width: int) -> None:
        engine = BlockEngine(width)
        served = engine.description
        limits = ShardLimits(ROWS_PER_SHARD, 1 << 30)
        plan = plan_of(served, rows_file(settings, shards * ROWS_PER_SHARD), limits=limits)
        self._spec = spec_of(plan)
        rows = tokenize_rows(
            list(plan.rows()),
            ByteTokenizer(),
            plan.selection.identity,
            TokenLimits(served.max_model_len, served.vocab_size),
        )
        self._shards = tuple(shards_of(rows, self._spec))
        self._chunks = [
            engine.capture(capture_task(plan.selection, shard.rows)) for shard in self._shards
        ]
        self.features = self._chunks[0].features
        self._roots = (settings.work / f"stage-{number}" for number in count())
        # All rows of all shards are held here, of which a job holds those in flight: they are not
        # to be walked through for garbage each time that one shard makes some.
        gc.collect()
        gc.freeze()

    def seconds(self, at_once: int) -> float:
        root = next(self._roots)
        store = open_store(root)

        def stage(shard: Shard) -> None:
            chunk = self._chunks[shard.index]
            stage_shard(store, self._spec, shard.index, shard.rows, [chunk])

        with ThreadPoolExecutor(at_once) as pool:
            took = timed(lambda: list(pool.map(stage, self._shards)))()
        shutil.rmtree(root)
        return took


def _write(folder: Path, data: memoryview, files: int) -> float:
    """Seconds until new files with these bytes, one after the other, are on the disk."""
    folder.mkdir()

    def write() -> None:
        for number in range(files):
            with (folder / str(number)).open("wb", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())

    took = timed(write)()
    shutil.rmtree(folder)
    return took


def _verifying(settings: Settings) -> Outcome:
    root = _dataset(settings)
    folder = root / "datasets" / DATASET
    features, tables = sorted(folder.glob("*.npy")), sorted(folder.glob("*.arrow"))
    calls = {
        "verify": timed(lambda: verify_dataset(root, DATASET).raise_first()),
        "one thread": timed(lambda: verify_dataset(root, DATASET, threads=1).raise_first()),
        "sha256": timed(lambda: [_digest(path) for path in features + tables]),
        "sha256 of features": timed(lambda: [_digest(path) for path in features]),
    }
    seconds = interleaved(settings.pick(9, 1), calls)
    one_thread = speed_ratio(seconds, "one thread", "sha256")
    alone = speed_ratio(seconds, "verify", "sha256 of features")
    return Outcome(
        [
            Measure("verify, of SHA-256", speed_ratio(seconds, "verify", "sha256"), "×", LEAST),
            Measure("verify with one thread, of SHA-256", one_thread, "×"),
            Measure("verify, of SHA-256 of the features alone", alone, "×"),
        ],
        _size(features) | {"MiB of tables": _mib(tables)},
        seconds,
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, np.uint8, "r").data).hexdigest()


def _reading(settings: Settings) -> Outcome:
    root = _dataset(settings)
    shards = sorted((root / "datasets" / DATASET).glob("*.npy"))
    dataset = load_dataset(root, DATASET, verify="full")
    features = dataset.features  # every shard is verified from here on
    single = settings.work / "single.npy"
    np.save(single, features)
    mapped = np.load(single, mmap_mode="r")
    size = settings.pick(1024, 64)
    order = np.random.default_rng(0).permutation(len(features))
    buffer = np.empty((size, features.shape[1]), np.float32)
    seconds = interleaved(
        settings.pick(7, 1),
        {
            "in order": _settled(lambda: _copy(_batches(dataset, size), buffer)),
            "copy": _settled(lambda: _copy(_slices(shards, size), buffer)),
            "shuffled": _settled(lambda: _use(_batches(dataset, size, shuffle=True))),
            "take": _settled(lambda: _use(_taken(mapped, order, size))),
        },
    )
    in_order = speed_ratio(seconds, "in order", "copy")
    shuffled = speed_ratio(seconds, "shuffled", "take")
    return Outcome(
        [
            Measure("in order, of a sequential copy of the maps", in_order, "×", least=LEAST),
            Measure("shuffled, of np.take of the permutation", shuffled, "×", least=LEAST),
        ],
        _size(shards) | {"rows per batch": size},
        seconds,
    )


def _settled(call: Callable[[], object]) -> Callable[[], float]:
    """Timed right after the same call: the first after another pays for the memory of its batches,
    which the other has just given back to the system.
    """
    return lambda: (call(), timed(call)())[1]


def _batches(
    dataset: ActivationDataset, size: int, *, shuffle: bool = False
) -> Iterable[NDArray[np.float32]]:
    return (batch.features for batch in dataset.iter_batches(size, shuffle=shuffle))


def _slices(shards: list[Path], size: int) -> Iterable[NDArray[np.float32]]:
    for path in shards:
        mapped = np.load(path, mmap_mode="r")[:, 0]
        yield from (mapped[at : at + size] for at in range(0, len(mapped), size))


def _taken(
    mapped: NDArray[np.float32], order: NDArray[np.int64], size: int
) -> Iterable[NDArray[np.float32]]:
    return (np.take(mapped, order[at : at + size], axis=0) for at in range(0, len(order), size))


def _copy(batches: Iterable[NDArray[np.float32]], buffer: NDArray[np.float32]) -> None:
    for batch in batches:
        np.copyto(buffer[: len(batch)], batch)


def _use(batches: Iterable[NDArray[np.float32]]) -> int:
    return sum(len(batch) for batch in batches)


def _dataset(settings: Settings) -> Path:
    """The root of a dataset of several shards; written once."""
    rows, width = settings.pick((16 * ROWS_PER_SHARD, 1024), (2 * ROWS_PER_SHARD, 16))
    root = settings.work / "several-shards"
    if not root.exists():
        run_worker("stream_to_disk", width, rows_file(settings, rows), root)
    return root


def _size(shards: list[Path]) -> dict[str, Any]:
    return {"shards": len(shards), "MiB": _mib(shards)}


def _mib(files: list[Path]) -> float:
    return round(sum(path.stat().st_size for path in files) / 2**20, 1)


STORAGE = (
    Benchmark(
        "staging",
        "B-6",
        "`stage_shard` of several shards on the local file system, as many at once as a job has in "
        "flight, against SHA-256 of the same bytes and a sequential write and fsync of them.",
        _staging,
    ),
    Benchmark(
        "verifying",
        "B-6",
        "`verify_dataset`, against SHA-256 of the same files, features and tables, on one thread.",
        _verifying,
    ),
    Benchmark(
        "reading",
        "B-6",
        "`iter_batches` of a verified dataset: in order against a sequential copy out of the "
        "mapped shards, shuffled against `np.take` of the same permutation out of one map.",
        _reading,
    ),
)
