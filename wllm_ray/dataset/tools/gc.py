"""Find, and on request remove, what attempts left behind that died or lost a race.

This is safe beside writers and committers at work, and no clock decides about data. The first
receipt of a shard stands for ever, so a file of that shard which it does not name can never
become part of the dataset; such files are what is removed. A shard without a receipt may have a
writer that is about to name its files, so they are left alone until the shard has one, or until
the dataset is given up (:mod:`.abandon`). Temporary files are known to their writer alone, and age
protects them: a writer that loses one has its write fail, with nothing half-written.

Where documents are damaged or files are missing nothing is removed: what looks like a leftover
may be what is needed to mend the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

from wllm_ray.dataset.format.layout import (
    DATASETS,
    MANIFEST_NAME,
    SPEC_NAME,
    folder,
    receipt_key,
    spec_key,
)
from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.dataset.reading.decided import is_abandoned
from wllm_ray.dataset.reading.staged import (
    committed_receipts,
    expect_listed,
    load_spec,
    read_receipts,
    standing_manifest,
)
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.dataset.tools.abandon import ONE_DAY
from wllm_ray.dataset.tools.folders import (
    content_shard,
    dataset_ids,
    file_sizes,
    is_ours,
    is_temporary,
)
from wllm_ray.errors import IntegrityError, InvalidInputError, NotFoundError

__all__ = ["GcReport", "Leftover", "collect_garbage", "expect_root"]

Kind: TypeAlias = Literal["temporary", "superseded", "foreign"]
State: TypeAlias = Literal["committed", "begun", "abandoned", "unknown", "damaged"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that no record names and none ever will.

    Attributes:
        key: Where it lies.
        bytes: Its size.
        kind: ``temporary``: of a write that was never finished; ``superseded``: of an attempt at
            a shard that another attempt finished, or at a dataset that was given up;
            ``foreign``: not of this library, and left.
        recent: Younger than was asked for, and therefore left.
        removed: It was removed.
    """

    key: str
    bytes: int
    kind: Kind
    recent: bool
    removed: bool = False

    @property
    def removable(self) -> bool:
        """Whether it may go."""
        return self.kind != "foreign" and not self.recent


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was found in the folder of one dataset.

    Attributes:
        dataset_id: Which.
        state: ``committed``; ``begun``, that is without a manifest, so that running the job again
            resumes it; ``abandoned``: given up, which is final; ``unknown``: nothing but
            leftovers; ``damaged``, so nothing was removed.
        shards: How many it is to have.
        staged: How many of them have a receipt.
        bytes: Of all files in the folder together.
        leftovers: Files that no record names, sorted by key.
        damage: What is wrong, if ``damaged``.
    """

    dataset_id: str
    state: State
    shards: int
    staged: int
    bytes: int
    leftovers: tuple[Leftover, ...]
    damage: IntegrityError | None = None

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        damage = self.damage
        return {
            "dataset_id": self.dataset_id,
            "state": self.state,
            "shards": self.shards,
            "shards_staged": self.staged,
            "bytes": self.bytes,
            "leftovers": [
                {
                    "key": one.key,
                    "bytes": one.bytes,
                    "kind": one.kind,
                    "recent": one.recent,
                    "removed": one.removed,
                }
                for one in self.leftovers
            ],
            "damage": damage and {"code": damage.code, "message": damage.message},
        }


def collect_garbage(
    root: Root,
    dataset_id: str | None = None,
    *,
    delete: bool = False,
    older_than: timedelta = ONE_DAY,
    now: datetime | None = None,
) -> Iterator[GcReport]:
    """Report the leftovers under a root, dataset by dataset, and remove them on request.

    Running it again is harmless, and so is running it twice at once.

    Args:
        root: The storage root.
        dataset_id: Look at this dataset only.
        delete: Remove what may be removed.
        older_than: Leave files that were written since; zero leaves none.
        now: The time to count from; the present where omitted.

    Raises:
        NotFoundError: No file lies under this id (``dataset_not_found``).
        StorageError: The root failed to list, read or delete.
    """
    store = open_store(root)
    # Clocks differ: with zero no file is too young, whatever its time.
    written_before = (now or datetime.now(UTC)) - older_than if older_than else None
    for found in [dataset_id] if dataset_id is not None else dataset_ids(store):
        report = _examined(store, found, written_before)
        yield _emptied(store, report) if delete else report


def expect_root(root: Root) -> None:
    """Refuse a place without any dataset that a slip explains; a root may be empty.

    Raises:
        NotFoundError: There is no such folder (``object_not_found``).
        InvalidInputError: It is the folder of datasets in a root (``invalid_argument``).
        StorageError: The root failed to list.
    """
    store = open_store(root)
    if store.local_path(DATASETS) is not None and not Path(store.uri).is_dir():
        raise NotFoundError(
            f"expected a storage root, found no folder {store.uri}; check the path",
            code="object_not_found",
        )
    parent, _, name = store.uri.rstrip("/").rpartition("/")
    if name == DATASETS and not parent.endswith("/") and dataset_ids(open_store(parent or "/")):
        raise InvalidInputError(
            f"{store.uri} is the folder of datasets inside a storage root; name the root, "
            f"{parent or '/'}",
            code="invalid_argument",
        )


@dataclass(frozen=True, slots=True)
class _Records:
    """What the documents of a dataset say: the names of its files, and the shards without any."""

    state: State
    shards: int
    named: frozenset[str]
    open_shards: frozenset[int]

    def kind(self, name: str) -> Kind | None:
        """Why a file is left over, or None where it is named or may yet be."""
        if name in self.named:
            return None
        if is_temporary(name):
            return "temporary"
        if not is_ours(name):
            return "foreign"
        return None if content_shard(name) in self.open_shards else "superseded"


_NO_RECORDS = _Records("unknown", 0, frozenset(), frozenset())
# Only its mark stays.
_ABANDONED = _Records("abandoned", 0, frozenset({MANIFEST_NAME}), frozenset())


def _examined(store: Store, dataset_id: str, written_before: datetime | None) -> GcReport:
    sizes = file_sizes(store, dataset_id)
    records, damage = _NO_RECORDS, None
    try:
        if not all(map(is_temporary, sizes)):
            records = _records(store, dataset_id, sizes)
    except IntegrityError as error:
        records, damage = replace(_NO_RECORDS, state="damaged"), error
    kinds = {} if damage else {name: records.kind(name) for name in sorted(sizes)}
    leftovers = []
    for name, kind in kinds.items():
        key = f"{folder(dataset_id)}/{name}"
        # A file that is gone by now was a temporary one.
        if kind is not None and (modified := store.modified(key)) is not None:
            recent = written_before is not None and modified >= written_before
            leftovers.append(Leftover(key, sizes[name], kind, recent=recent))
    return GcReport(
        dataset_id=dataset_id,
        state=records.state,
        shards=records.shards,
        staged=records.shards - len(records.open_shards),
        bytes=sum(sizes.values()),
        leftovers=tuple(leftovers),
        damage=damage,
    )


def _records(store: Store, dataset_id: str, sizes: Mapping[str, int]) -> _Records:
    """What the documents say, of a dataset that lacks no file and has none of another size.

    Raises:
        IntegrityError: It is damaged.
    """
    if is_abandoned(store, dataset_id):
        return _ABANDONED
    manifest = standing_manifest(store, dataset_id)
    spec = _spec(store, dataset_id)
    if manifest is not None:
        receipts = committed_receipts(store, spec, manifest)
    else:
        listed = {f"{folder(dataset_id)}/{name}": size for name, size in sizes.items()}
        receipts = read_receipts(store, spec, listed)
    named = {SPEC_NAME, MANIFEST_NAME}
    for number, receipt in receipts.items():
        named.add(receipt_key(dataset_id, number).rpartition("/")[2])
        for entry in receipt.files:
            expect_listed(store, dataset_id, entry, sizes.get(entry.name))
            named.add(entry.name)
    return _Records(
        state="begun" if manifest is None else "committed",
        shards=len(spec.shards),
        named=frozenset(named),
        open_shards=frozenset(range(len(spec.shards))) - receipts.keys(),
    )


def _spec(store: Store, dataset_id: str) -> DatasetSpec:
    try:
        return load_spec(store, dataset_id)
    except NotFoundError:
        raise IntegrityError(
            f"{spec_key(dataset_id)}: it is missing, though files are there that nothing else "
            f"explains; restore it, or give the dataset up (`wllm gc --abandon`)",
            code="file_missing",
        ) from None


def _emptied(store: Store, report: GcReport) -> GcReport:
    """The report, once what may go is gone."""
    leftovers = []
    for one in report.leftovers:
        if one.removable:
            store.delete(one.key)
        leftovers.append(replace(one, removed=one.removable))
    return replace(report, leftovers=tuple(leftovers))
