"""`verify` beyond what a reader checks: what agrees with every digest and is wrong all the same."""

from __future__ import annotations

import json
import os
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from dataset_builders import FAILED_ROW, capture, make_rows, make_spec, rows_of, write_dataset

from wllm_ray.dataset.format.build import manifest_digest
from wllm_ray.dataset.format.documents import read_manifest, read_receipt
from wllm_ray.dataset.format.layout import file_name, folder, manifest_key, receipt_key, spec_key
from wllm_ray.dataset.format.manifest import TraceSpec, document_bytes
from wllm_ray.dataset.format.rows import ROWS_SCHEMA, decode_rows
from wllm_ray.dataset.reading import checks
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.repeated import Place, RowIds
from wllm_ray.dataset.reading.rowtable import read_rows
from wllm_ray.dataset.reading.staged import load_spec
from wllm_ray.dataset.reading.verify import THREADS, verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.digest import rows_digest, token_digest
from wllm_ray.errors import IntegrityError, NotFoundError, StorageError

pytestmark = pytest.mark.requirement("L-4", "D-6")


def arrow_file(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_batch(table)
    return sink.getvalue().to_pybytes()


def changed(batch, column, row, value):
    values = batch.column(column).to_pylist()
    values[row] = value
    field = ROWS_SCHEMA.field(column)
    return batch.set_column(
        ROWS_SCHEMA.get_field_index(column), field, pa.array(values, field.type)
    )


def resealed(store, shard, change, *, role="rows"):
    """Change a file and then every digest over it, as an author would who lies from the start."""
    spec = load_spec(store, "d")
    key = receipt_key("d", shard)
    receipt = read_receipt(store.get(key), spec, shard)
    entry = next(entry for entry in receipt.files if entry.role == role)
    data = change(store.get(f"{folder('d')}/{entry.name}"))
    suffix = entry.name.removeprefix(file_name(shard, entry.sha256, ""))
    stored = store.put_content(f"{folder('d')}/shard-{shard:05d}-", suffix, data)
    new = entry.model_copy(
        update={
            "name": stored.key.rpartition("/")[2],
            "sha256": stored.sha256,
            "bytes": stored.bytes,
        }
    )
    files = tuple(new if one is entry else one for one in receipt.files)
    update = {"files": files}
    if role == "rows":
        update["rows_sha256"] = rows_sha256(pa.ipc.open_file(data).get_batch(0))
    store.delete(key)
    store.delete(manifest_key("d"))
    store.put(key, document_bytes(receipt.model_copy(update=update)))
    commit_manifest(store, "d")
    return new.name


def rows_sha256(batch):
    columns = ("request_sha256", "token_sha256", "status")
    requests, tokens, status = (batch.column(name).to_pylist() for name in columns)
    hexes = [None if one is None else one.hex() for one in tokens]
    return rows_digest(zip((one.hex() for one in requests), hexes, status, strict=True))


def table(*changes):
    """Cells of a rows table to change: (column, row, value)."""

    def change(data):
        batch = decode_rows(data, "t")
        for one in changes:
            batch = changed(batch, *one)
        return arrow_file(batch)

    return change


def tokens(row, ids):
    return [("token_ids", row, ids), ("token_sha256", row, bytes.fromhex(token_digest(ids)))]


def failure(**changes):
    text = {"code": "too_long", "message": "m", "permanent": True, "stage": "tokenize"} | changes
    return json.dumps(text, sort_keys=True, separators=(",", ":"))


LIES = {
    "an id of another shard": (1, table(("id", 1, "r-0")), "rows_inconsistent", "same id 'r-0'"),
    "an id of the same shard": (0, table(("id", 2, "r-0")), "rows_inconsistent", "0 and 2"),
    "token ids of another digest": (
        0,
        table(("token_ids", 0, [9, 9])),
        "digest_mismatch",
        "token_sha256",
    ),
    "an index outside the row": (
        0,
        table(*tokens(0, [5])),
        "rows_inconsistent",
        r"row 0 has features, but its 1 token ids lack one that position index:1,-2 names",
    ),
    "no token at all": (1, table(*tokens(0, [])), "rows_inconsistent", "row 3 .* its 0 token ids"),
    "a failure that may pass": (
        0,
        table(("failure", 1, failure(permanent=False))),
        "rows_inconsistent",
        "permanent, found 'too_long'",
    ),
    "a failure that may pass and says it may not": (
        0,
        table(
            ("status", 1, "hook_failed"),
            ("failure", 1, failure(code="hook_failed", stage="capture")),
        ),
        "rows_inconsistent",
        "permanent, found 'hook_failed'",
    ),
    "a failure in another spelling": (
        0,
        table(("failure", 1, failure(message="\u00e9"))),
        "table_invalid",
        "a row failure is the canonical JSON of an object, found one in another spelling",
    ),
    "a token id below 0": (
        1,
        table(*tokens(2, np.array([7, -1], np.int32))),
        "table_invalid",
        "token ids from 0, found the token id -1",
    ),
    "an empty id": (1, table(("id", 2, "")), "table_invalid", "found an empty id"),
    "a failure that is none": (0, table(("failure", 1, "{}")), "table_invalid", "cannot be read"),
    "a failure of another code": (
        0,
        table(("failure", 1, failure(code="zero_tokens"))),
        "digest_mismatch",
        "failure codes",
    ),
    "metadata in another spelling": (
        0,
        table(("metadata", 2, '{"a": 1}')),
        "table_invalid",
        "another spelling",
    ),
    "metadata that is no JSON": (0, table(("metadata", 2, "{")), "table_invalid", "not JSON"),
    "metadata that is a list": (0, table(("metadata", 2, "[]")), "table_invalid", "found list"),
    "a null where there is none": (1, table(("length", 0, None)), "table_invalid", "length.* null"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_agrees_with_every_digest_and_is_wrong(store, root, lie):
    shard, change, code, match = LIES[lie]
    write_dataset(store, make_rows(6, failed=[FAILED_ROW]), position="index:1,-2")
    assert verify_dataset(root, "d").ok
    name = resealed(store, shard, change)
    (fault,) = verify_dataset(root, "d").faults
    assert (fault.code, fault.file) == (code, name)
    with pytest.raises(IntegrityError, match=match):
        verify_dataset(root, "d").raise_first()


def hidden(data):
    """The same token ids; beneath the row that has none lie some that would not do."""
    batch = decode_rows(data, "t")
    rows = batch.column("token_ids").to_pylist()
    values = [value for row in rows for value in (row or [-7, -8])]
    offsets = np.cumsum([0, *(len(row or [-7, -8]) for row in rows)])
    field = ROWS_SCHEMA.field("token_ids")
    column = pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()),
        pa.array(values, pa.int32()),
        type=field.type,
        mask=pa.array([row is None for row in rows]),
    )
    assert -7 in column.values.to_pylist()
    return arrow_file(batch.set_column(ROWS_SCHEMA.get_field_index("token_ids"), field, column))


@pytest.mark.parametrize(
    "change",
    [
        table(("status", 1, "new"), ("failure", 1, failure(code="new", stage="new"))),
        hidden,
    ],
    ids=["a code of later", "values beneath a null"],
)
def test_what_looks_odd_and_is_allowed(store, root, change):
    write_dataset(store, make_rows(6, failed=[FAILED_ROW]))
    before = load_dataset(root, "d").token_ids
    resealed(store, 0, change)
    assert verify_dataset(root, "d").faults == ()
    dataset = load_dataset(root, "d")
    assert [failure.index for failure in dataset.failures.values()] == [FAILED_ROW]
    assert all(map(np.array_equal, dataset.token_ids, before))


def test_values_that_are_not_numbers_with_a_right_digest(store, root):
    write_dataset(store, make_rows(6))
    name = resealed(store, 1, lambda data: data[:-4] + np.float32("inf").tobytes(), role="features")
    assert [(one.code, one.file) for one in verify_dataset(root, "d").faults] == [
        ("values_not_finite", name)
    ]


@pytest.mark.parametrize("shape", ["float32", "brain", "two sites"])
def test_a_vector_of_zeros_with_a_right_digest(store, root, shape):
    """The last one of the file, minus zero throughout."""
    size, options = {
        "float32": (16, {}),
        "brain": (8, SHAPES["brain"]),
        "two sites": (16, {"sites": ("embed", "L1_mlp_out")}),
    }[shape]
    minus_zero = b"\0" * (size // 4 - 1) + b"\x80"
    write_dataset(store, make_rows(6), **options)
    name = resealed(store, 1, lambda data: data[:-size] + 4 * minus_zero, role="features")
    (fault,) = verify_dataset(root, "d").faults
    assert (fault.code, fault.file) == ("rows_inconsistent", name)
    assert "feature row 2 holds a vector that is zero throughout" in fault.message


def test_lengths_whose_sum_wraps_around():
    """They add up to three, modulo 2**64."""
    rows = make_rows(3)
    store = open_store("memory://wrapping")
    shard = write_dataset(store, rows).shards[0]
    key = f"datasets/d/{shard.rows_file.name}"
    most = 2**63 - 1
    lengths = [most, most, 5]
    with np.errstate(over="ignore"):
        offsets = (np.cumsum(lengths, dtype=np.int64) - np.array(lengths)).tolist()
    cells = [
        (column, row, values[row])
        for column, values in {"length": lengths, "offset": offsets}.items()
        for row in range(3)
    ]
    assert sum(lengths) - 2**64 == shard.feature_rows
    with pytest.raises(IntegrityError, match="the lengths"):
        read_rows(table(*cells)(store.get(key)), shard, "all_generated")


def test_a_manifest_that_says_other_things_than_the_receipts(store, root):
    manifest = write_dataset(store, make_rows(6))
    shard = manifest.shards[1].model_copy(update={"timings": {"engine": 9.0}})
    forged = manifest.model_copy(update={"shards": (manifest.shards[0], shard)})
    forged = forged.model_copy(update={"manifest_sha256": manifest_digest(forged)})
    store.put(manifest_key("d"), document_bytes(forged), mode="overwrite")
    assert read_manifest(store.get(manifest_key("d"))) == forged
    (fault,) = verify_dataset(root, "d").faults
    assert (fault.code, fault.file) == ("rows_inconsistent", "manifest.json")
    assert "its spec and receipts give" in fault.message


# --- whatever the shape ---------------------------------------------------------------------------

TRACE = TraceSpec(sites=("embed", "L1_mlp_out"), site_widths=(4, 4))
SHAPES = {
    "ragged": {"position": "all_prompt"},
    "a file per site": {
        "sites": ("embed", "L1_mlp_out"),
        "site_widths": (4, 6),
        "position": "all_prompt",
    },
    "arrow": {"shard_format": "arrow"},
    "half": {"storage_dtype": "float16", "dtype": "float16", "shard_format": "arrow"},
    "brain": {
        "storage_dtype": "native",
        "dtype": "bfloat16",
        "described": {"engine_dtype": "bfloat16"},
    },
    "traced": {"trace": TRACE, "sites": ("L1_mlp_out",), "position": "mean_prompt"},
    "traced, narrow": {
        "trace": TRACE,
        "sites": ("L1_mlp_out", "embed"),
        "shard_layout": "per_site",
        "storage_dtype": "float16",
        "dtype": "float16",
        "position": "index:1,0",
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_sound_dataset_of_any_shape(store, root, shape, threads):
    """The second shard has failed rows only."""
    manifest = write_dataset(store, make_rows(7, failed=[FAILED_ROW, 3, 4, 5]), **SHAPES[shape])
    seen = []
    report = verify_dataset(
        root, "d", threads=threads, on_bytes=lambda done, total: seen.append((done, total))
    )
    assert (report.faults, report.advice) == ((), "")
    assert report.bytes == manifest.bytes
    assert seen == sorted(seen)
    assert seen[-1] == (manifest.bytes, manifest.bytes)
    assert len(seen) == report.files - 1


@pytest.mark.requirement("D-9")
@pytest.mark.parametrize("shape", ["traced", "traced, narrow"])
def test_features_that_are_not_of_their_traces(store, root, shape):
    """Every digest is right, and so is every value by itself."""
    write_dataset(store, make_rows(6), **SHAPES[shape])
    name = resealed(store, 1, lambda data: data[:-2] + b"\x12\x34", role="features")
    (fault,) = verify_dataset(root, "d").faults
    assert (fault.code, fault.file) == ("rows_inconsistent", name)
    assert "the features of row 5 are not those that its trace gives" in fault.message


@pytest.mark.requirement("D-9")
def test_a_rows_table_that_is_gone_is_no_fault_of_the_traces_beside_it(store, root):
    (first, _) = write_dataset(store, make_rows(6), **SHAPES["traced"]).shards
    store.delete(f"datasets/d/{first.rows_file.name}")
    (fault,) = verify_dataset(root, "d").faults
    assert (fault.code, fault.file) == ("file_missing", first.rows_file.name)
    key = f"datasets/d/{first.trace_file.name}"
    store.put(key, store.get(key)[:-1] + b"\x55", mode="overwrite")
    faults = verify_dataset(root, "d").faults
    assert [one.file for one in faults] == [first.rows_file.name, first.trace_file.name]


@pytest.mark.parametrize("threads", [1, 4])
def test_faults_come_in_the_order_of_the_files(store, root, threads):
    manifest = write_dataset(store, make_rows(30))
    files = [(shard.shard, entry) for shard in manifest.shards[::3] for entry in shard.files]
    for _, entry in files:
        key = f"datasets/d/{entry.name}"
        store.put(key, store.get(key)[:-1] + b"\x55", mode="overwrite")
    report = verify_dataset(root, "d", threads=threads)
    expected = sorted(((shard, entry.role != "rows"), entry.name) for shard, entry in files)
    assert [fault.file for fault in report.faults] == [name for _, name in expected]


def test_no_more_files_are_in_memory_than_threads():
    store = open_store("memory://counted")
    write_dataset(store, make_rows(30))
    held = []
    lock, running = threading.Lock(), []
    real = store.get

    def get(key, **options):
        with lock:
            running.append(key)
            held.append(len(running))
        try:
            return real(key, **options)
        finally:
            with lock:
                running.remove(key)

    store.get = get
    assert verify_dataset(store, "d", threads=2).ok
    assert max(held) <= 2


@pytest.mark.parametrize("options", [{}, {"threads": 2}, {"threads": 7}], ids=str)
def test_so_many_files_are_read_at_once(options):
    threads = options.get("threads", THREADS)
    store = open_store(f"memory://parallel-{threads}")
    write_dataset(store, make_rows(30))
    # Nobody gets a receipt before as many are asked for as there should be threads.
    meeting, wanted = threading.Barrier(threads), set()
    real = store.get

    def get(key, **options):
        if "receipt" in key and len(wanted) < threads:
            wanted.add(key)
            meeting.wait(timeout=30)
        return real(key, **options)

    store.get = get
    assert verify_dataset(store, "d", **options).ok
    assert len(wanted) == threads >= 2


def test_local_files_are_read_by_no_more_threads_than_there_are_cores(tmp_path, monkeypatch):
    write_dataset(open_store(tmp_path), make_rows(30))
    threads, real = set(), checks.Check.fault

    def fault(self):
        if threading.current_thread() is not threading.main_thread():
            threads.add(threading.get_ident())
            time.sleep(0.01)  # or one thread would do all
        return real(self)

    monkeypatch.setattr(checks.Check, "fault", fault)
    for cores, expected in ((1, 1), (2, 2), (64, THREADS)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        threads.clear()
        assert verify_dataset(tmp_path, "d").ok
        assert len(threads) == expected


def test_one_thread_begins_with_the_tables_and_the_others_with_features(store, root, monkeypatch):
    write_dataset(store, make_rows(30))
    begun: dict[int, list[str]] = {}
    meeting = threading.Barrier(3)
    real = checks.Check.fault

    def fault(self):
        mine = begun.setdefault(threading.get_ident(), [])
        mine.append(self.file)
        if len(mine) == 1 and len(begun) <= meeting.parties:
            meeting.wait(timeout=30)
        return real(self)

    monkeypatch.setattr(checks.Check, "fault", fault)
    assert verify_dataset(root, "d", threads=3).ok
    firsts = [files[0].rpartition(".")[2] for files in begun.values()][: meeting.parties]
    assert sorted(firsts) == ["json", "npy", "npy"]


def test_who_interrupts_waits_for_what_is_begun_and_for_nothing_else(store, root, monkeypatch):
    write_dataset(store, make_rows(30))
    begun, real = [], checks.Check.fault

    def fault(self):
        begun.append(self.file)
        time.sleep(0.02)
        return real(self)

    def interrupt(_done, _total):
        raise KeyboardInterrupt

    monkeypatch.setattr(checks.Check, "fault", fault)
    with pytest.raises(KeyboardInterrupt) as kept:  # and with it every frame
        verify_dataset(root, "d", threads=2, on_bytes=interrupt)
    so_far = len(begun)
    time.sleep(0.2)
    assert so_far == len(begun) < 10
    assert kept


def test_a_dataset_that_was_begun_is_told_from_one_that_is_not_there(store, root):
    rows = make_rows(6)
    spec = make_spec(rows)
    create_spec(store, spec)
    part = rows_of(spec, rows, 0)
    stage_shard(store, spec, 0, part, [capture(part, spec)])
    with pytest.raises(NotFoundError, match=r"begun but not committed; shards staged so far: 1"):
        verify_dataset(root, "d")
    with pytest.raises(NotFoundError, match="committed there: none"):
        verify_dataset(root, "e")


# --- ids ------------------------------------------------------------------------------------------


class Colliding(str):
    """A text whose hash says nothing."""

    __slots__ = ()
    __hash__ = lambda self: 7  # noqa: E731


def test_equal_hashes_are_no_equal_ids():
    tables = [[Colliding(f"{table}-{row}") for row in range(4)] for table in range(3)]
    ids = RowIds()
    for number in (2, 0, 1):
        ids.add(number, tables[number])
    assert list(ids.repeated(tables.__getitem__)) == []
    tables[2][3] = tables[0][1]
    assert list(ids.repeated(tables.__getitem__)) == [("0-1", Place(0, 1), Place(2, 3))]


def test_every_repetition_is_named_and_other_tables_are_not_read_again():
    tables = {0: ["a", "b"], 1: ["c", "d"], 5: ["b", "e", "b"]}
    ids = RowIds()
    for number, found in tables.items():
        ids.add(number, found)
    read = []

    def ids_of(number):
        read.append(number)
        return tables[number]

    repeated = list(ids.repeated(ids_of))
    assert repeated == [("b", Place(0, 1), Place(5, 0)), ("b", Place(0, 1), Place(5, 2))]
    assert read == [0, 5]
    assert list(RowIds().repeated(ids_of)) == []


def test_files_of_a_shard_whose_receipt_is_missing_are_not_called_left_over(store):
    manifest = write_dataset(store, make_rows(6))
    store.put(f"{folder('d')}/notes.txt", b"mine")
    store.delete(receipt_key("d", 1))
    report = verify_dataset(store, "d")
    assert [fault.code for fault in report.faults] == ["file_missing"]
    assert [note.partition(":")[0] for note in report.notes] == ["datasets/d/notes.txt"]
    assert len(manifest.shards) == 2


def test_what_is_left_over_is_told_of_a_damaged_dataset_as_well(store):
    write_dataset(store, make_rows(6))
    store.put(f"{folder('d')}/notes.txt", b"mine")
    store.put(f"{folder('d')}/shard-00007.receipt.json", b"{}")
    store.put(spec_key("d"), b"{}", mode="overwrite")
    report = verify_dataset(store, "d")
    assert [fault.file for fault in report.faults] == ["spec.json"]
    assert report.notes == (
        "datasets/d/notes.txt: 4 bytes, no record",
        "datasets/d/shard-00007.receipt.json: 2 bytes, no record",
    )


def test_a_folder_that_cannot_be_listed_is_a_fault_and_hides_no_other(store, monkeypatch):
    manifest = write_dataset(store, make_rows(6))
    store.delete(receipt_key("d", 1))

    def fails(_prefix):
        raise StorageError("could not list", code="storage_failed")

    monkeypatch.setattr(store, "list", fails)
    report = verify_dataset(store, "d")
    assert [(one.code, one.file) for one in report.faults] == [
        ("storage_failed", "datasets/d"),
        ("file_missing", receipt_key("d", 1).rpartition("/")[2]),
    ]
    assert (report.notes, report.bytes) == ((), manifest.bytes)


def test_a_fault_names_its_file_once_also_where_it_is_raised(store):
    manifest = write_dataset(store, make_rows(6))
    name = manifest.shards[1].rows_file.name
    key = f"{folder('d')}/{name}"
    store.put(key, store.get(key)[:-1] + b"x", mode="overwrite")
    (fault,) = verify_dataset(store, "d").faults
    assert fault.message.startswith("expected SHA-256 ")
    with pytest.raises(IntegrityError, match=f"^{name}: expected SHA-256 ") as error:
        load_dataset(store, "d", verify="full")
    assert error.value.message.count(name) == 1


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("name", ["manifest.json", "spec.json", "shard-00000.receipt.json"])
def test_a_document_of_any_size_takes_no_memory(local, name):
    """A file of zeros that takes up no space: it is refused by its size, unread."""
    write_dataset(local, make_rows(6))
    path = local.local_path(f"datasets/d/{name}")
    os.truncate(path, 1 << 40)
    (fault,) = verify_dataset(local, "d").faults
    assert (fault.code, fault.file) == ("manifest_invalid", name)
    assert f"at most {512 << 20} bytes, found {1 << 40}" in fault.message
    if name == "manifest.json":
        with pytest.raises(IntegrityError, match="expected a document of at most"):
            load_dataset(local, "d")


def test_a_root_that_cannot_be_read_is_no_damage(store, root):
    manifest = write_dataset(store, make_rows(6))
    name = manifest.shards[1].rows_file.name
    real = store.get

    def get(key, **options):
        if key.endswith(name):
            raise StorageError("the root is away")
        return real(key, **options)

    store.get, store.local_path = get, lambda key: None
    report = verify_dataset(store, "d")
    assert [(fault.code, fault.file) for fault in report.faults] == [("storage_failed", name)]
    assert "verify again" in report.advice
    assert "restore" not in report.advice
