"""What the system says of memory."""

import gc
import os
import threading
from pathlib import Path

import pytest

from wllm_ray import memory

MIB = 1024 * 1024


def test_a_container_with_less_room_than_its_machine_counts(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory() == 4 * MIB
    for name, text in {
        "memory.max": f"{3 * MIB}\n",
        "memory.current": f"{2 * MIB}\n",
        "memory.stat": f"anon 5\ninactive_file {MIB}\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory.available_memory() == 2 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == 4 * MIB
    (tmp_path / "meminfo").unlink()
    assert memory.available_memory() is None
    assert memory.resident_memory() == 0


def test_resident_memory_is_that_of_this_process():
    status = Path("/proc/self/status").read_text()
    kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert abs(memory.resident_memory() - kib * 1024) < 20 * MIB


def test_freed_memory_that_the_c_library_keeps_is_given_back():
    blocks = [bytearray(b"x" * 100_000) for _ in range(3000)]
    pins = blocks[::500]  # the heap cannot shrink past these by itself
    del blocks
    before = memory.resident_memory()
    memory.release_unused()
    assert before - memory.resident_memory() > 100 * MIB
    del pins


def test_the_collector_rests_until_the_last_caller_is_done():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with memory.collector_paused():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with memory.collector_paused():
        thread.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_the_collector_goes_on_after_an_error():
    with pytest.raises(KeyError), memory.collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_caller_turned_off_stays_off():
    gc.disable()
    try:
        with memory.collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_fork_in_the_middle_of_a_pause_collects_and_may_pause():
    with memory.collector_paused():
        child = os.fork()
        if not child:
            was_on = gc.isenabled()
            with memory.collector_paused():
                is_off = not gc.isenabled()
            os._exit(0 if was_on and is_off and gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
    assert gc.isenabled()
