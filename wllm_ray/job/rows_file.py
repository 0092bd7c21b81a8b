"""A JSONL file read as often as needed, with memory that does not grow with it.

The first pass checks every line and every id; it keeps 12 bytes per row, and another 12 bytes per
repeated id if there are any.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import IntegrityError, InvalidInputError, StorageError
from wllm_ray.records import InputRow
from wllm_ray.rows import (
    MAX_LISTED_PROBLEMS,
    RowProblem,
    id_of,
    raise_problems,
    read_jsonl,
    repeated_id,
)

__all__ = ["RowsFile"]

HASH_BYTES = 12


class RowsFile:
    """Rows of a file; calling it starts a pass.

    Args:
        location: A path, or the URI of an object under a storage root (``s3://bucket/rows.jsonl``).
            It is read more than once.

    Raises:
        InvalidInputError: There is no such file, or it is something else.
    """

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self._location = os.fspath(location)
        if not self._is_object():
            _expect_file(Path(self._location))
        self._checked = False

    def check(self) -> None:
        """Read all rows once, so that nothing is begun on a malformed input.

        Raises:
            InvalidInputError: Malformed rows (``invalid_rows``) or none (``no_rows``).
        """
        for _ in self._first_pass():
            pass

    def _is_object(self) -> bool:
        return "://" in self._location

    def _open(self) -> BinaryIO:
        if not self._is_object():
            return Path(self._location).open("rb")
        root, _, key = self._location.rpartition("/")
        return open_store(root).open(key)

    def __call__(self) -> Iterator[InputRow]:
        """Read all rows; the first time, check them all before the iterator ends.

        Raises:
            InvalidInputError: Malformed rows (``invalid_rows``) or none (``no_rows``), at the end
                of the first pass.
            IntegrityError: A later pass finds a malformed row: the file was changed.
        """
        return self._again() if self._checked else self._first_pass()

    def _items(self) -> Iterator[tuple[int, InputRow | RowProblem]]:
        try:
            with self._open() as stream:
                yield from read_jsonl(stream)
        except StorageError:
            raise
        except OSError as error:
            raise InvalidInputError(
                f"cannot read {self._location}: {error.strerror}", code="invalid_argument"
            ) from error

    def _first_pass(self) -> Iterator[InputRow]:
        hashes = bytearray()
        problems: list[RowProblem] = []
        malformed = 0
        for _, item in self._items():
            if (row_id := id_of(item)) is not None:
                hashes += _id_hash(row_id)
            if isinstance(item, RowProblem):
                malformed += 1
                if malformed <= MAX_LISTED_PROBLEMS:
                    problems.append(item)
            else:
                yield item
        repeated = _repeated(hashes)
        if len(repeated):
            problems, malformed = self._all_problems(repeated)
        raise_problems(problems, malformed)
        if not hashes:
            raise InvalidInputError(
                f"{self._location} holds no rows", code="no_rows", stage="parse_rows"
            )
        self._checked = True

    def _again(self) -> Iterator[InputRow]:
        for line, item in self._items():
            if isinstance(item, RowProblem):
                raise IntegrityError(
                    f"line {line} of {self._location} was well formed when the file was checked "
                    f"and is not now; leave the file alone while it is read, and run again",
                    code="rows_inconsistent",
                )
            yield item

    def _all_problems(self, repeated: NDArray[np.bytes_]) -> tuple[list[RowProblem], int]:
        """The first problems and how many there are, found by reading the file once more.

        Args:
            repeated: Hashes of the ids that occur more than once.
        """
        problems: list[RowProblem] = []
        count = 0
        first_line = np.zeros(len(repeated), np.int64)
        for line, item in self._items():
            problem = item if isinstance(item, RowProblem) else None
            row_id = id_of(item)
            at = None if row_id is None else _find(repeated, _id_hash(row_id))
            if at is not None and first_line[at]:
                problem = repeated_id(line, item, int(first_line[at]))
            elif at is not None:
                first_line[at] = line
            if problem is not None:
                count += 1
                problems += [problem] * (count <= MAX_LISTED_PROBLEMS)
        if not problems:
            raise IntegrityError(
                f"{self._location} had repeated ids when it was read first, and has none now; "
                f"leave the file alone while it is read, and run again",
                code="rows_inconsistent",
            )
        return problems, count


def _expect_file(path: Path) -> None:
    if not path.exists():
        raise InvalidInputError(
            f"no file {path} on the machine where this runs; give a path that it sees, or the URI "
            f"of an object (s3://…, gs://…, az://…)",
            code="invalid_argument",
        )
    if not path.is_file():
        raise InvalidInputError(
            f"expected a regular file, found {path}, which cannot be read twice; "
            f"save the rows to a file first",
            code="invalid_argument",
        )


def _id_hash(row_id: str) -> bytes:
    return hashlib.blake2b(row_id.encode(), digest_size=HASH_BYTES).digest()


def _repeated(hashes: bytearray) -> NDArray[np.bytes_]:
    """The hashes that occur more than once, each once, sorted. Sorts ``hashes`` in place."""
    ordered = np.frombuffer(hashes, dtype=f"S{HASH_BYTES}")
    ordered.sort()
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _find(repeated: NDArray[np.bytes_], value: bytes) -> int | None:
    at = int(np.searchsorted(repeated, np.bytes_(value)))
    # NumPy drops zero bytes at the end when it hands one element out.
    found = at < len(repeated) and bytes(repeated[at]) == value.rstrip(b"\0")
    return at if found else None
