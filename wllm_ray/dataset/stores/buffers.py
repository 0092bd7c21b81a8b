"""What a store writes: one buffer, or several that follow one another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["Buffers", "blocks", "sha256_of", "views"]

# collections.abc.Buffer arrives with Python 3.12.
Buffers: TypeAlias = bytes | memoryview | Sequence[bytes | memoryview]


def views(data: Buffers) -> list[memoryview]:
    """The bytes as flat [bytes] uint8 views, in order, without copying; empty ones left out."""
    parts = [data] if isinstance(data, (bytes, memoryview)) else data
    # A view with a zero in its shape cannot be cast, and has nothing to write.
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def blocks(buffers: Sequence[memoryview], most: int) -> Iterator[memoryview]:
    """Flat buffers in pieces of at most ``most`` bytes, without copying."""
    for buffer in buffers:
        for at in range(0, len(buffer), most):
            yield buffer[at : at + most]


def sha256_of(buffers: Sequence[memoryview]) -> str:
    """SHA-256 of flat buffers that follow one another, in hex."""
    total = hashlib.sha256()
    for buffer in buffers:
        total.update(buffer)
    return total.hexdigest()
