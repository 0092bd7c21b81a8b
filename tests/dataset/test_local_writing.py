"""How bytes get into a local file."""

import errno
import hashlib
import os

import pytest

from wllm_ray.dataset.stores import local_writing
from wllm_ray.dataset.stores.local_writing import write, write_and_hash

PARTS = [b"head", b"", bytes(range(256)) * 40, b"tail"]


@pytest.mark.requirement("D-4")
@pytest.mark.parametrize("at_once", [1, 1000, 8 << 20])
def test_every_byte_is_written_and_written_back_once(tmp_path, monkeypatch, at_once):
    """The system may write less than it is asked to."""
    monkeypatch.setattr(local_writing, "_WRITTEN_AT_ONCE", at_once)
    monkeypatch.setattr(local_writing, "_WORTH_WRITEBACK", 1)
    real, begun = os.write, []
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 2)]))
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _fd, at, count, _advice: begun.append((at, at + count))
    )
    write(tmp_path / "file", [memoryview(part) for part in PARTS])
    data = b"".join(PARTS)
    assert (tmp_path / "file").read_bytes() == data
    starts, stops = zip(*begun, strict=True)
    assert starts == (0, *stops[:-1])
    assert stops[-1] == len(data)


@pytest.mark.requirement("D-4")
def test_a_large_file_is_on_its_way_before_all_of_it_is_written(tmp_path, monkeypatch):
    calls = []

    def recorded(name, real):
        return lambda *asked: (calls.append(name), real(*asked))[1]

    for name in ("write", "posix_fadvise", "fsync"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    data = os.urandom(1 << 20) * 20
    sha256 = write_and_hash(tmp_path / "file", [memoryview(b"head"), memoryview(data)])
    assert sha256 == hashlib.sha256(b"head" + data).hexdigest()
    assert (tmp_path / "file").read_bytes() == b"head" + data
    # What is small is left to fsync.
    assert calls == ["write", *["write", "posix_fadvise"] * 3, "fsync"]


@pytest.mark.requirement("D-4")
def test_advice_that_the_system_does_not_take_is_no_error(tmp_path, monkeypatch):
    def refuse(*_asked):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    data = os.urandom(1 << 20) * 2
    write(tmp_path / "file", [memoryview(data)])
    assert (tmp_path / "file").read_bytes() == data
