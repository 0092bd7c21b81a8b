"""Find out by trying what a storage root can do, before anybody relies on it."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from wllm_ray.dataset.stores.store import Probe
from wllm_ray.errors import AlreadyExistsError, ConflictError, StorageError, WLLMError

if TYPE_CHECKING:
    from wllm_ray.dataset.stores.store import Store

__all__ = ["expect_create_only", "probe_store"]

# As few as can race: the probe runs whenever an application starts.
_RACERS = (b"first", b"other")


def probe_store(store: Store) -> Probe:
    """Let two writers race for one small object, read it, write it once more, and remove it.

    Returns:
        What was found; where the root failed, ``detail`` is the error's message.
    """
    try:
        with _scratch(store) as key:
            winners = _race(store, key)
            found = store.get(key)
            if found not in _RACERS:
                return Probe(writable=False, create_only=False, detail="it returns other bytes")
            exclusive = winners == [found] and _refuses_another(store, key, found)
    except WLLMError as error:
        return Probe(writable=False, create_only=False, detail=error.message)
    detail = "writable, create-only honoured" if exclusive else "create-only is not honoured"
    return Probe(writable=True, create_only=exclusive, detail=detail)


def expect_create_only(store: Store) -> None:
    """Refuse a root that more than one writer would damage.

    Raises:
        StorageError: The root cannot be written.
        ConflictError: It lets a second writer overwrite the first (``single_writer_root``).
    """
    probe = store.probe()
    if not probe.writable:
        raise StorageError(f"the storage root {store.uri} cannot be used: {probe.detail}")
    if not probe.create_only:
        raise ConflictError(
            f"the storage root {store.uri} does not honour create-only writes: a second writer "
            f"replaces what the first one wrote and neither is told. Expected a file system with "
            f"hard links, or an object store with conditional writes (If-None-Match); choose "
            f"another storage root",
            code="single_writer_root",
        )


@contextlib.contextmanager
def _scratch(store: Store) -> Iterator[str]:
    """A key of our own, removed again; a failure inside is told rather than one of removing."""
    key = f"probe-{uuid.uuid4().hex}"
    try:
        yield key
    except WLLMError:
        with contextlib.suppress(WLLMError):
            store.delete(key)
        raise
    store.delete(key)


def _race(store: Store, key: str) -> list[bytes]:
    """Create one object twice at once, with other bytes; returns the bytes that won."""
    start = threading.Barrier(len(_RACERS))

    def create(data: bytes) -> bool:
        start.wait()
        return _creates(store, key, data)

    with ThreadPoolExecutor(len(_RACERS)) as pool:
        won = list(pool.map(create, _RACERS))
    return [data for data, has_won in zip(_RACERS, won, strict=True) if has_won]


def _refuses_another(store: Store, key: str, standing: bytes) -> bool:
    return not _creates(store, key, b"later") and store.get(key) == standing


def _creates(store: Store, key: str, data: bytes) -> bool:
    try:
        store.put(key, data)
    except AlreadyExistsError:
        return False
    return True
