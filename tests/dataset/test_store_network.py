"""A store over a network that fails: the real client and a real S3 server, a proxy between them."""

from __future__ import annotations

import os
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
from dataset_builders import make_rows
from reading_builders import write_exact

from tests.servers import stores
from tests.servers.faults import DROPPED, LOST, STALLED, Fault, FaultProxy, refused
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores import remote as remote_module
from wllm_ray.dataset.stores import remote_client
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import AlreadyExistsError, NotFoundError, StorageError

pytestmark = pytest.mark.requirement("D-4")

# More than the client tries, and than we do.
ALWAYS = 12
CONFLICT = refused(409, "ConditionalRequestConflict")
SLOW_DOWN = refused(503, "SlowDown")


@pytest.fixture(scope="module")
def running_proxy(moto):
    with FaultProxy(moto["AWS_ENDPOINT_URL"]).running() as proxy:
        yield proxy


@pytest.fixture
def proxy(running_proxy, monkeypatch):
    for name, value in stores.s3_environment(running_proxy.port).items():
        monkeypatch.setenv(name, value)
    running_proxy.clear()
    return running_proxy


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """As many tries as by default or fewer, without the waiting between them."""
    monkeypatch.setattr(remote_client, "FIRST_BACKOFF", timedelta(milliseconds=1))
    monkeypatch.setattr(remote_client, "MAX_RETRIES", 3)
    monkeypatch.setattr(remote_module, "_CONFLICT_PAUSES_S", (0.01,) * 5)


@pytest.fixture
def impatient(store, monkeypatch):
    """The same store, which waits half a second for an answer."""
    monkeypatch.setattr(remote_client, "CONNECT_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(remote_client, "READ_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr(remote_client, "RETRY_TIMEOUT", timedelta(seconds=0.7))
    return open_store(store.uri)


@pytest.fixture
def store(proxy, request):
    return open_store(f"s3://{stores.BUCKET}/{request.node.name}".replace("[", "-").rstrip("]"))


def heard(proxy, method):
    return sum(one == method for one, _ in proxy.heard)


READS = {
    "get": lambda store, size: store.get("a"),
    "range": lambda store, size: store.get_range("a", 0, size),
    "ranges": lambda store, size: b"".join(store.get_ranges("a", [(0, 9), (9, size)])),
    "open": lambda store, size: store.open("a").read(),
}
WRITES = {
    "create": lambda store: store.put("a", b"x"),
    "overwrite": lambda store: store.put("a", b"x", mode="overwrite"),
    "content": lambda store: store.put_content("a-", ".npy", b"x"),
}


@pytest.mark.parametrize("fault", [LOST, DROPPED, SLOW_DOWN, refused(500)])
def test_a_request_that_fails_once_is_made_again(store, proxy, fault):
    for key, mode in (("a", "create"), ("b", "overwrite")):
        proxy.script(fault, on="PUT")
        store.put(key, key.encode(), mode=mode)
        assert store.get(key) == key.encode()


@pytest.mark.parametrize("fault", [DROPPED, SLOW_DOWN])
@pytest.mark.parametrize("write", WRITES)
def test_a_request_that_always_fails_is_an_error_and_stores_nothing(store, proxy, fault, write):
    proxy.script(*[fault] * ALWAYS, on="PUT")
    with pytest.raises(StorageError, match=r"could not write a.* run again") as error:
        WRITES[write](store)
    assert error.value.code == "storage_failed"
    assert store.size("a") is None
    assert heard(proxy, "PUT") == 4


def test_a_create_whose_answer_was_lost_says_that_the_same_bytes_are_there(store, proxy):
    proxy.script(LOST, on="PUT")
    assert store.put("a", b"x") is False
    assert store.get("a") == b"x"


def test_a_create_that_was_stored_but_never_answered_is_settled_by_reading_back(impatient, proxy):
    proxy.script(Fault(cut=-1, stalls=True), on="PUT")
    assert impatient.put("a", b"x") is True
    assert heard(proxy, "PUT") == 1


def test_a_lost_create_over_other_bytes_is_a_conflict(store, proxy):
    store.put("a", b"other")
    proxy.script(LOST, on="PUT")
    with pytest.raises(AlreadyExistsError, match="with other bytes"):
        store.put("a", b"x")
    assert store.get("a") == b"other"


def test_a_create_that_timed_out_with_nothing_there_says_so(impatient, proxy):
    proxy.script(STALLED, on="PUT")
    with pytest.raises(StorageError, match="and nothing is there: no answer in time"):
        impatient.put("a", b"x")


def test_a_create_that_cannot_be_read_back_says_so(store, proxy):
    proxy.script(*[LOST] * ALWAYS, on="PUT")
    proxy.script(*[DROPPED] * ALWAYS, on="GET")
    with pytest.raises(StorageError, match=r"could not write a under .*, nor read it back"):
        store.put("a", b"x")


def test_creates_that_met_each_other_are_tried_again_and_one_wins(store, proxy):
    """S3 answers 409 to both, and has stored nothing."""
    proxy.script(CONFLICT, CONFLICT, CONFLICT, on="PUT")

    def create(data):
        try:
            return store.put("a", data)
        except AlreadyExistsError:
            return None

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(create, (b"0", b"1")))
    assert sorted(outcomes, key=str) == [None, True]
    assert store.get("a") == b"%d" % outcomes.index(True)


def test_a_create_that_only_meets_conflicts_is_given_up(store, proxy):
    proxy.script(*[CONFLICT] * ALWAYS, on="PUT")
    with pytest.raises(StorageError, match=r"nothing is there: .*HTTP 409"):
        store.put("a", b"x")
    assert heard(proxy, "PUT") == 6


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("fault", [Fault(cut=1000), DROPPED])
@pytest.mark.parametrize("read", READS)
def test_a_body_that_breaks_off_is_read_again_or_an_error_but_never_short(
    store, proxy, fault, read
):
    data = os.urandom(100_000)
    store.put("a", data)
    proxy.script(fault, on="GET")
    assert READS[read](store, len(data)) == data
    proxy.script(*[fault] * ALWAYS, on="GET")
    with pytest.raises(StorageError, match="could not read a under"):
        READS[read](store, len(data))


@pytest.mark.parametrize("read", ["get", "open"])
def test_a_body_that_stalls_is_read_again_or_an_error(store, impatient, proxy, read):
    store.put("a", bytes(100_000))
    stalled = Fault(cut=1000, stalls=True)
    proxy.script(stalled, on="GET")
    assert READS[read](impatient, 100_000) == bytes(100_000)
    proxy.script(*[stalled] * ALWAYS, on="GET")
    with pytest.raises(StorageError, match="could not read a under"):
        READS[read](impatient, 100_000)


@pytest.mark.parametrize("read", ["range", "ranges", "open"])
def test_a_server_that_answers_with_less_is_an_error(store, proxy, read):
    store.put("a", b"0123456789abcdef")
    proxy.script(*[Fault(is_done=False, status=206, body=b"0123")] * ALWAYS, on="GET")
    with pytest.raises(StorageError, match="could not read a under"):
        READS[read](store, 16)


def test_ranges_that_are_far_apart_cost_no_more_bytes_than_they_have(store, proxy):
    """Neighbours share a request, since a request costs as long as a MiB or so."""
    data = os.urandom(9 << 20)
    store.put("a", data, mode="overwrite")
    near, far, end = 1000, 5 << 20, len(data)
    asked = [(far, far + 10), (0, 10), (end - 10, end), (near, near + 10)]
    proxy.clear()
    found = store.get_ranges("a", asked)
    assert [bytes(part) for part in found] == [data[start:stop] for start, stop in asked]
    assert heard(proxy, "GET") == 3
    assert proxy.answered == (near + 10) + 10 + 10


@pytest.mark.requirement("P-4")
def test_two_rows_of_a_large_file_are_fetched_alone(store, proxy):
    """Of a file whose first and last row are farther apart than a request is worth."""
    width = 1 << 15
    rows = make_rows(40)
    (expected,) = write_exact(store, rows, site_widths=(width,), per_shard=40)
    dataset = load_dataset(store, "d", verify="off")
    (entry,) = dataset.manifest.shards[0].features_files
    ids = dataset.row_ids
    proxy.clear()
    found = dataset.select([ids[0], ids[-1]]).features
    assert np.array_equal(found, expected[[0, -1]])
    assert 2 * 4 * width <= proxy.answered < 2 * 4 * width + 20_000 < entry.bytes / 10


LARGE = bytes(20 << 20)


@pytest.mark.parametrize("on", ["POST", "partNumber=2", "POST /roots/large/d/s-x?"])
def test_an_upload_in_parts_survives_lost_answers(proxy, on):
    store = open_store(f"s3://{stores.BUCKET}/large")
    proxy.script(LOST, on=on)
    stored = store.put_content("d/s-", ".npy", LARGE)
    assert store.get(stored.key) == LARGE
    assert heard(proxy, "POST") >= 2


def test_an_upload_whose_part_is_refused_is_taken_back(store, proxy):
    proxy.script(refused(400), on="partNumber=2")
    with pytest.raises(StorageError, match="could not write d/s-"):
        store.put_content("d/s-", ".npy", LARGE)
    assert heard(proxy, "DELETE") == 1
    assert store.list("d") == []


def test_an_upload_has_few_parts_under_way(store, proxy, monkeypatch):
    """Of many, so that more could be."""
    monkeypatch.setattr(remote_module, "PART_BYTES", 5 << 20)  # the least that S3 takes
    store.put_content("d/s-", ".npy", bytes(24 * 5 << 20))
    assert sum("partNumber" in path for _, path in proxy.heard) == 24
    # The client does not wait before it sends the last one.
    assert 1 < proxy.most_at_once <= remote_module.PARTS_IN_FLIGHT + 1 == 5


SECRET = "AKIASECRETSECRET"
REFUSALS = [
    (refused(403, "AccessDenied"), "the credentials do not allow this"),
    (refused(403, "InvalidAccessKeyId"), "the credentials are wrong or have expired"),
    (refused(400, "ExpiredToken"), "the credentials are wrong or have expired"),
    (refused(404, "NoSuchBucket"), "there is no such bucket or container"),
    (refused(301, "PermanentRedirect"), "the bucket is in another region; set AWS_REGION"),
]


@pytest.mark.parametrize(("fault", "words"), REFUSALS)
def test_a_refusal_says_what_to_check_and_repeats_no_secret(
    store, proxy, monkeypatch, fault, words
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    body = fault.body.replace(
        b"<Error>", f"<Error><AWSAccessKeyId>{SECRET}</AWSAccessKeyId>".encode()
    )
    fault = Fault(is_done=False, status=fault.status, body=body)
    store = open_store(store.uri)
    reads = [lambda: store.get("a"), lambda: store.get_range("a", 0, 1), lambda: store.list("d")]
    for call in (*[lambda w=w: w(store) for w in WRITES.values()], *reads):
        proxy.clear()
        proxy.script(*[fault] * ALWAYS, on="/")
        with pytest.raises(StorageError, match=words) as error:
            call()
        assert SECRET not in "".join(traceback.format_exception(error.value))


def test_an_object_that_is_not_there_stays_not_found(store, proxy):
    with pytest.raises(NotFoundError, match="no a under"):
        store.get("a")
    assert heard(proxy, "GET") == 1


TIME_OUTS = ("timeout", "connect_timeout", "read_timeout")


@pytest.mark.parametrize("name", TIME_OUTS)
@pytest.mark.parametrize(
    ("root", "prefix"),
    [("s3://b/x", "AWS_"), ("az://b/x", "AZURE_"), ("gs://b/x", "GOOGLE_")],
)
def test_time_outs_are_those_of_the_environment_or_ours(monkeypatch, name, root, prefix):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    opened = []
    real = remote_client.from_url

    def from_url(uri, *, client_options, **options):
        opened.append(client_options)
        return real(uri, client_options=client_options, **options)

    monkeypatch.setattr(remote_client, "from_url", from_url)
    open_store(root)
    monkeypatch.setenv(f"{prefix}{name.upper()}", "77s")
    open_store(root)
    ours, theirs = opened
    assert all(isinstance(ours[one], timedelta) for one in TIME_OUTS)
    assert theirs == ours | {name: "77s"}


@pytest.mark.parametrize("name", ["AWS_TIMEOUT", "AWS_READ_TIMEOUT"])
def test_no_answer_is_waited_for_longer_than_the_environment_says(store, proxy, monkeypatch, name):
    monkeypatch.setattr(remote_client, "RETRY_TIMEOUT", timedelta(seconds=0.7))
    monkeypatch.setenv(name, "500ms")
    impatient = open_store(store.uri)
    proxy.script(*[STALLED] * ALWAYS, on="GET")
    began = time.monotonic()
    with pytest.raises(StorageError, match="no answer in time"):
        impatient.get("a")
    # Ours are 20 s and more.
    assert time.monotonic() - began < 15


def test_a_dead_address_is_a_storage_error_in_bounded_time(impatient, monkeypatch):
    """A full queue of connections: what is sent there is never answered, not even by a refusal."""
    with socket.socket() as server, socket.socket() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        waiting.connect(("127.0.0.1", port))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        store = open_store(f"s3://{stores.BUCKET}/x")
        with pytest.raises(StorageError, match=r"no answer in time|nobody answers at the address"):
            store.put("a", b"x")


def test_a_closed_port_is_a_storage_error(proxy, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        store = open_store(f"s3://{stores.BUCKET}/x")
        with pytest.raises(StorageError, match="nobody answers at the address"):
            store.get("a")
