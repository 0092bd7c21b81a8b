"""A JSONL file read as often as needed, with memory that does not grow with it.

The first pass checks every line and every id; it keeps 16 bytes per row, and another 16 bytes per
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

from wllm_ray.dataset.store import open_store
from wllm_ray.errors import IntegrityError, InvalidInputError, StorageError
from wllm_ray.records import InputRow
from wllm_ray.rows import MAX_LISTED_PROBLEMS, RowProblem, raise_problems, read_jsonl

__all__ = ["RowsFile"]

HASH_BYTES = 16


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
            if isinstance(item, RowProblem):
                malformed += 1
                if malformed <= MAX_LISTED_PROBLEMS:
                    problems.append(item)
            else:
                hashes += _id_hash(item)
                yield item
        repeated = _repeated(hashes)
        problems += self._repeated_ids(repeated)
        problems.sort(key=lambda problem: problem.line)
        raise_problems(problems, malformed + _count_repeats(hashes))
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

    def _repeated_ids(self, repeated: NDArray[np.bytes_]) -> list[RowProblem]:
        """The first rows whose id was used before, found by reading the file once more."""
        problems: list[RowProblem] = []
        first_line = np.zeros(len(repeated), np.int64)
        source = self._items() if len(repeated) else iter(())
        for line, item in source:
            if isinstance(item, RowProblem) or (at := _find(repeated, _id_hash(item))) is None:
                continue
            if not first_line[at]:
                first_line[at] = line
                continue
            problems.append(RowProblem(line, f"`id` was used before, on line {first_line[at]}"))
            if len(problems) == MAX_LISTED_PROBLEMS:
                break
        return problems


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


def _id_hash(row: InputRow) -> bytes:
    return hashlib.blake2b(row.id.encode(), digest_size=HASH_BYTES).digest()


def _repeated(hashes: bytearray) -> NDArray[np.bytes_]:
    """The hashes that occur more than once, each once, sorted. Sorts ``hashes`` in place."""
    ordered = np.frombuffer(hashes, dtype=f"S{HASH_BYTES}")
    ordered.sort()
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _count_repeats(ordered: bytearray) -> int:
    """How many rows repeat an id, in what :func:`_repeated` has sorted."""
    values = np.frombuffer(ordered, dtype=f"S{HASH_BYTES}")
    return int((values[1:] == values[:-1]).sum())


def _find(repeated: NDArray[np.bytes_], value: bytes) -> int | None:
    at = int(np.searchsorted(repeated, np.bytes_(value)))
    # NumPy drops zero bytes at the end when it hands one element out.
    found = at < len(repeated) and bytes(repeated[at]) == value.rstrip(b"\0")
    return at if found else None
