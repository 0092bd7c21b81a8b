"""Copies to the host: on a GPU behind the gather, on a stream of their own, read when whole.

There is no GPU here: a stand-in for ``torch.cuda`` notes what it is asked, and does the copies only
when somebody waits for their event, as a slow GPU would.
"""

import contextlib

import numpy as np
import pytest
import torch

from wllm_ray.capture import staging
from wllm_ray.capture.staging import CudaStager, HostStager, stager_for

pytestmark = pytest.mark.requirement("C-4")

DEVICE = torch.device("cpu")


class Event:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self, stream):
        self.cuda.log.append("event recorded")
        assert stream is self.cuda.copies
        self.waiting, self.cuda.queued = self.cuda.queued, []

    def synchronize(self):
        self.cuda.log.append("event waited for")
        for copy in self.waiting:
            copy()


class Stream:
    def __init__(self, cuda):
        self.cuda = cuda

    def wait_stream(self, other):
        assert other == "the model's stream"
        self.cuda.log.append("copy stream waits for the model's")


class Cuda:
    """What the stager needs of ``torch.cuda``; copies are late."""

    def __init__(self):
        self.log, self.queued, self.inside = [], [], None

    def Stream(self, device):  # noqa: N802 (torch's name)
        assert device == DEVICE
        self.copies = Stream(self)
        return self.copies

    def Event(self):  # noqa: N802 (torch's name)
        return Event(self)

    def current_stream(self, _):
        return "the model's stream"

    @contextlib.contextmanager
    def stream(self, stream):
        self.inside = stream
        yield
        self.inside = None


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in; tensors tell it of copies and of streams that use them."""
    fake = Cuda()
    copy = torch.Tensor.copy_

    def late(target, source, *, non_blocking=False):
        assert fake.inside is fake.copies
        assert non_blocking
        fake.log.append("copy started")
        # The memory is the allocator's again unless the stream was recorded on it.
        fake.queued.append(lambda: copy(target, source))
        return target

    def record(_, stream):
        assert stream is fake.copies
        fake.log.append("memory kept for the copy stream")

    monkeypatch.setattr(torch.Tensor, "copy_", late)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return fake


def stager(cuda):
    return CudaStager(DEVICE, cuda, pin=False)


def rows(value, count=3, width=4, dtype=torch.float32):
    return torch.full((count, width), float(value), dtype=dtype)


def test_the_order_of_what_is_asked_of_the_gpu(cuda):
    pending = stager(cuda).stage("L0_resid_post", rows(1))
    assert cuda.log == [
        "copy stream waits for the model's",
        "copy started",
        "memory kept for the copy stream",
        "event recorded",
    ]
    pending.read()
    assert cuda.log[4:] == ["event waited for"]


def test_nothing_is_read_before_the_copy_is_whole(cuda):
    pending = stager(cuda).stage("L0_resid_post", rows(7))
    assert pending.read().tolist() == [[7.0] * 4] * 3


def test_without_the_wait_rows_are_torn(cuda, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(Event, "synchronize", lambda _: None)
    one = stager(cuda)
    for value in (7, 8):
        pending = one.stage("L0_resid_post", rows(value))
    assert pending.read().tolist() != [[8.0] * 4] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_are_used_again_and_what_was_read_stays(cuda, dtype):
    one = stager(cuda)
    first = one.stage("a", rows(1, dtype=dtype)).read()
    second = one.stage("a", rows(2, dtype=dtype)).read()
    assert len(one._buffers) == 1
    assert first.tolist() == [[1.0] * 4] * 3
    assert second.tolist() == [[2.0] * 4] * 3
    assert first.dtype == np.float32


def test_places_of_one_pass_do_not_share_a_buffer(cuda):
    one = stager(cuda)
    pending = [one.stage(name, rows(value)) for value, name in enumerate("abc")]
    assert [found.read()[0, 0] for found in pending] == [0, 1, 2]


def test_a_buffer_grows_and_fits_less(cuda):
    one = stager(cuda)
    for count, width in ((2, 4), (5, 4), (3, 4), (3, 6)):
        found = one.stage("a", rows(count, count, width)).read()
        assert found.tolist() == [[float(count)] * width] * count
    assert one._buffers["a"].shape == (3, 6)


def test_a_buffer_is_not_made_anew_for_each_pass(cuda, monkeypatch):
    made, empty = [], torch.empty

    def note(*args, **kwargs):
        made.append(args)
        return empty(*args, **kwargs)

    monkeypatch.setattr(staging.torch, "empty", note)
    one = stager(cuda)
    for count in (9, 3, 1, 9, 4):
        one.stage("a", rows(1, count)).read()
    assert len(made) == 1


@pytest.mark.requirement("C-10")
def test_values_of_16_bits_are_widened_and_not_changed(cuda):
    values = torch.randn(5, 8).bfloat16()
    found = stager(cuda).stage("a", values).read()
    assert np.array_equal(found, values.float().numpy())
    assert np.array_equal(HostStager().stage("a", values).read(), values.float().numpy())


def test_an_index_is_on_the_models_device():
    for one in (HostStager(), CudaStager(DEVICE, Cuda(), pin=False)):
        assert one.index(np.array([3, 1], dtype=np.int64)).tolist() == [3, 1]


def test_each_device_has_its_stager():
    assert isinstance(stager_for(DEVICE), HostStager)
