"""Any history of writers, crashes and third hands leaves whole datasets or none.

Hypothesis makes up the histories. Two or three writers run interleaved, one storage operation at a
time; each may die, be refused or lose an answer at any of them. After every step the root is read
past all of our code: what a reader or a resubmission could meet must be sound at that moment.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from functools import partial
from unittest import mock

import numpy as np
import pytest
from dataset_builders import (
    features_of,
    make_spec,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from protocol_jobs import (
    ATTEMPT_STEP,
    GOOD,
    KINDS,
    ROWS,
    SHARDS,
    Engine,
    expected_content,
    give_up,
    remove_leftovers,
    run_job,
    stage,
)
from stepped_store import Died, Fault, InlineExecutor, Writer

from wllm_ray.dataset.format.abandoned import abandoned_mark
from wllm_ray.dataset.format.layout import folder, manifest_key, receipt_key, spec_key
from wllm_ray.dataset.format.manifest import document_bytes
from wllm_ray.dataset.format.rows import decode_rows
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools import abandon
from wllm_ray.dataset.writing import shard_files
from wllm_ray.dataset.writing.writer import (
    StageResult,
    commit_manifest,
    create_spec,
)
from wllm_ray.errors import (
    ROW_FAILURE_CODES,
    ConflictError,
    IntegrityError,
    NotFoundError,
    RowsFailedError,
    StorageError,
)

pytestmark = pytest.mark.requirement("D-3", "D-4", "D-5", "D-7", "D-10")

TRANSIENT = {code for code, (_, permanent, _) in ROW_FAILURE_CODES.items() if not permanent}
_names = itertools.count()


def flip(data):
    return bytes([data[0] ^ 1]) + data[1:]


class Protocol(RuleBasedStateMachine):
    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        mixed=st.booleans(),
        bitwise=st.booleans(),
        staged=st.dictionaries(st.integers(0, SHARDS - 1), st.sampled_from([1, 1, 1, 1, 1, 2])),
        committed=st.booleans(),
    )
    def begin(self, kind, mixed, bitwise, staged, committed):
        self.store = open_store(f"memory://protocol-{next(_names)}")
        asked = KINDS[kind] | {"per_shard": 2, "mixed_fingerprints": mixed}
        self.specs = [make_spec(ROWS, position=one, **asked) for one in ("all_prompt", "first")]
        self.bitwise, self.mixed = bitwise, mixed
        self.attempts = itertools.count(0 if bitwise else 1, 0 if bitwise else 1)
        self.writers: list[Writer] = []
        self.harmed: dict[str, tuple[bytes, bytes | None]] = {}
        self.first: dict[str, bytes] = {}
        self.given_up = False
        self.checked: set[bytes] = set()
        # Neither has a place between the steps of one thread; the probe has tests of its own.
        patches = [
            mock.patch.object(shard_files, "ThreadPoolExecutor", InlineExecutor),
            mock.patch.object(abandon, "expect_create_only"),
        ]
        for patch in patches:
            patch.start()
        self.unpatch = lambda: [patch.stop() for patch in patches]
        if staged:
            create_spec(self.store, self.specs[0])
        for shard, threads in staged.items():
            engine = self.engine(threads)
            self.finished(partial(stage, spec=self.specs[0], shard=shard, engine=engine))
        if committed:
            self.finished(partial(run_job, spec=self.specs[0], engine=self.engine()))

    def engine(self, threads=1, loses=0):
        return Engine(next(self.attempts), threads, loses)

    def finished(self, work):
        """A writer that has run to its end without a neighbour."""
        writer = Writer(self.store, work)
        writer.run()
        return writer

    # --- what may happen ----------------------------------------------------------------------

    @precondition(lambda self: len(self.writers) < 3)
    @rule(loses=st.integers(0, 1))
    def resubmit(self, loses):
        """The whole job, while the others stand still."""
        self.start("job", 0, 0, 1, loses)
        self.run_to_the_end(len(self.writers) - 1)

    @precondition(lambda self: len(self.writers) < 3)
    @rule(
        what=st.sampled_from(["job", "job", "stage", "commit", "commit", "gc", "give up"]),
        which=st.sampled_from([0, 0, 0, 1]),
        shard=st.integers(0, SHARDS - 1),
        threads=st.sampled_from([1, 1, 1, 1, 2]),
        loses=st.integers(0, 2),
    )
    def start(self, what, which, shard, threads, loses):
        spec, engine = self.specs[which], self.engine(threads, loses)
        if what == "stage" and self.read(spec_key("d")) != document_bytes(spec):
            return  # nobody stages before the spec stands
        if what == "give up" and (self.given_up or any(one.gives_up for one in self.writers)):
            return  # once more would free the id, on somebody's word that no writer is left
        work = {
            "job": partial(run_job, spec=spec, engine=engine),
            "stage": partial(stage, spec=spec, shard=shard, engine=engine),
            "commit": lambda _, store: commit_manifest(store, "d"),
            "gc": lambda _, store: remove_leftovers(store),
            "give up": lambda _, store: give_up(store),
        }[what]
        writer = Writer(self.store, work)
        writer.harmed, writer.threads = bool(self.harmed), threads
        writer.gives_up = what == "give up"
        writer.must_notice = {
            "job": set(self.harmed),
            "stage": set(),
            "commit": set(self.harmed) & set(self.first),
            "gc": set(),
            "give up": set(),
        }[what]
        self.writers.append(writer)

    @precondition(lambda self: self.writers)
    @rule(who=st.integers(0, 2), steps=st.integers(1, 12))
    def advance(self, who, steps):
        for _ in range(steps):
            self.step(who)

    @precondition(lambda self: self.writers)
    @rule(who=st.integers(0, 2), fault=st.sampled_from([one for one in Fault if one.value]))
    def fail(self, who, fault):
        self.step(who, fault)

    @precondition(lambda self: self.writers)
    @rule(who=st.integers(0, 2))
    def run_to_the_end(self, who):
        writer = self.writers[who % len(self.writers)]
        while writer in self.writers:
            self.step(self.writers.index(writer))

    def step(self, who, fault=Fault.NONE):
        if not self.writers:
            return
        writer = self.writers[who % len(self.writers)]
        if not writer.ended:
            writer.step(fault)
        if writer.changed:
            self.sound()
        if writer.ended:
            self.writers.remove(writer)
            self.judge(writer)

    @precondition(lambda self: self.first and not self.given_up)
    @rule(data=st.data(), how=st.sampled_from(["flipped", "truncated", "gone"]))
    def harm(self, data, how):
        key = data.draw(st.sampled_from(sorted(self.recorded())))
        before = self.read(key)
        if before is None or key in self.harmed:
            return
        uncommitted = key == manifest_key("d") or not self.read(manifest_key("d"))
        if how == "gone" and uncommitted and key in self.first:
            how = "flipped"  # of a dataset without a manifest, what is gone was never there
        after = {"gone": None, "truncated": before[:-1], "flipped": flip(before)}[how]
        self.harmed[key] = before, after
        if after is None:
            self.store.delete(key)
        else:
            self.store.put(key, after, mode="overwrite")
        for writer in self.writers:
            writer.harmed = True

    @precondition(lambda self: self.harmed)
    @rule()
    def restore(self):
        for key, (before, _) in self.harmed.items():
            self.store.put(key, before, mode="overwrite")
        self.harmed.clear()

    @precondition(lambda self: not self.writers and not self.harmed and not self.given_up)
    @rule(shard=st.integers(0, SHARDS - 1))
    def give_a_shard_up(self, shard):
        """What messages advise where a file cannot be restored: remove the receipt."""
        key = receipt_key("d", shard)
        if self.read(manifest_key("d")) is None:
            self.store.delete(key)
            self.first.pop(key, None)

    @rule()
    def read_everything(self):
        committed = self.read(manifest_key("d")) is not None and not self.given_up
        try:
            dataset = load_dataset(self.store, "d", verify="full")
        except NotFoundError:
            assert not committed
        except IntegrityError:
            assert self.harmed
        else:
            assert committed
            assert not self.harmed
            assert dataset.row_ids == [row.id for row in GOOD]
            self.expect_one_attempt_in_each_shard(dataset)

    # --- what must hold -----------------------------------------------------------------------

    @invariant()
    def sound(self):
        """Nothing that was decided changes, and nothing is decided before its files are there."""
        if self.given_up:
            # Decided as well, and by the same name; nothing else is any more.
            assert self.read(manifest_key("d")) == abandoned_mark("d")
            return
        if self.read(manifest_key("d")) == abandoned_mark("d"):
            assert manifest_key("d") not in self.first, "committed and then given up"
            self.given_up = True
            self.harmed.clear()
            return
        for key, (before, after) in list(self.harmed.items()):
            found = self.read(key)
            # Files have the names of their contents, so writing one again mends it.
            mended = found == before and key not in self.first
            assert mended or found == after, f"{key} was damaged and then written anew"
            if mended:
                del self.harmed[key]
        keys = [spec_key("d"), *(receipt_key("d", n) for n in range(SHARDS)), manifest_key("d")]
        documents = {key: self.read(key) for key in keys}
        for key, data in documents.items():
            if data is not None and key not in self.harmed:
                assert self.first.setdefault(key, data) == data, f"{key} changed"
            assert data is not None or key not in self.first or key in self.harmed
        if documents[manifest_key("d")] is not None:
            missing = [key for key in keys if documents[key] is None and key not in self.harmed]
            assert not missing, f"committed without {missing}"
        for key in keys[1:]:
            if documents[key] is not None and key not in self.harmed:
                self.expect_files(key, documents[key])

    def expect_files(self, key, data):
        document = json.loads(data)
        shards = document["shards"] if key == manifest_key("d") else [document]
        entries = [entry for shard in shards for entry in shard["files"]]
        for entry in entries:
            name = f"{folder('d')}/{entry['name']}"
            if name not in self.harmed:
                found = self.read(name)
                assert found is not None, f"{key} names {name}, which is not there"
                assert hashlib.sha256(found).hexdigest() == entry["sha256"]
        if key != manifest_key("d") and data not in self.checked and not self.harmed:
            self.checked.add(data)
            name = next(entry["name"] for entry in entries if entry["role"] == "rows")
            self.expect_rows(document, self.read(f"{folder('d')}/{name}"))

    def expect_rows(self, receipt, table):
        batch = decode_rows(table, "rows")
        wanted = range(receipt["first_row"], receipt["first_row"] + receipt["rows"])
        assert batch.column("row").to_pylist() == list(wanted)
        assert not TRANSIENT & set(batch.column("status").to_pylist())

    def expect_one_attempt_in_each_shard(self, dataset):
        """Features are those of one attempt: never rows of two, never anything else."""
        spec = self.specs[dataset.manifest.position == "first"]
        shards = np.repeat([row.index // 2 for row in GOOD], np.diff(dataset.offsets))
        for site, width, end in zip(
            spec.sites, spec.site_widths, itertools.accumulate(spec.site_widths), strict=True
        ):
            expected = np.concatenate(
                [features_of(row, spec)[:, end - width : end] for row in GOOD]
            )
            attempts = (dataset.site(site) - expected) / ATTEMPT_STEP
            for shard in range(SHARDS):
                values = set(attempts[shards == shard].reshape(-1).tolist())
                assert len(values) == 1, f"shard {shard} has features of attempts {values}"
                assert values == {0.0} or not self.bitwise

    def judge(self, writer):
        """Whether a writer that ended said what was true."""
        error = writer.error
        if error is None:
            unnoticed = writer.must_notice & set(self.harmed)
            assert not unnoticed, f"{unnoticed} went unnoticed"
            self.expect_stored(writer)
        elif isinstance(error, IntegrityError):
            # Who meets a file that has just gone is not always told why.
            assert writer.harmed or self.given_up, repr(error)
        elif isinstance(error, StorageError):
            assert writer.faulted, repr(error)
        elif not isinstance(error, (Died, ConflictError, RowsFailedError, NotFoundError)):
            raise error

    def expect_stored(self, writer):
        """What was returned as standing does stand."""
        if isinstance(writer.result, StageResult):
            if self.given_up:
                return
            document = writer.result.receipt
            key = receipt_key("d", document.shard)
            same = self.bitwise and self.fingerprints().get(document.shard) == writer.threads
            assert not (writer.result.superseded and same and not writer.harmed)
        elif writer.result is not None:
            document, key = writer.result, manifest_key("d")
        else:
            return
        if key not in self.harmed:
            assert self.read(key) == document_bytes(document)

    def teardown(self):
        if not hasattr(self, "unpatch"):
            return
        for writer in self.writers:
            writer.kill()
        self.restore()
        self.sound()
        self.finish()
        self.unpatch()

    def finish(self):
        """One undisturbed resubmission: the dataset, or the reason why there can be none."""
        if self.given_up:
            writer = self.finished(partial(run_job, spec=self.specs[0], engine=self.engine()))
            assert isinstance(writer.error, ConflictError), repr(writer.error)
            assert writer.error.code == "dataset_abandoned"
            self.finished(lambda _, store: give_up(store))
            left = [key for key, _ in self.store.list(folder("d"))]
            assert left in ([], [manifest_key("d")]), left
            return
        stored = self.read(spec_key("d"))
        spec = next((one for one in self.specs if document_bytes(one) == stored), self.specs[0])
        found = set(self.fingerprints().values())
        writer = self.finished(partial(run_job, spec=spec, engine=self.engine()))
        if len(found | {1}) > 1 and not (self.mixed or self.read(manifest_key("d"))):
            assert isinstance(writer.error, ConflictError), repr(writer.error)
            assert writer.error.code == "mixed_fingerprints"
            return
        assert writer.error is None, repr(writer.error)
        self.sound()
        self.read_everything()
        threads = self.fingerprints()
        assert len(set(threads.values())) == 1 or writer.result.reproducibility == "mixed"
        if self.bitwise:
            assert writer.result.content_sha256 == expected_content(spec, threads)

    # --- the root, past all of our code -------------------------------------------------------

    def read(self, key):
        try:
            return self.store.get(key)
        except NotFoundError:
            return None

    def recorded(self):
        """Keys of all documents and of the files that they name."""
        keys = set(self.first)
        for key, data in self.first.items():
            if "receipt" in key:
                keys |= {f"{folder('d')}/{entry['name']}" for entry in json.loads(data)["files"]}
        return keys

    def fingerprints(self):
        """Shard → threads of the engine, by the receipts that stand."""
        receipts = {n: self.first.get(receipt_key("d", n)) for n in range(SHARDS)}
        return {
            n: json.loads(data)["fingerprint"]["threads"] for n, data in receipts.items() if data
        }


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=50, stateful_step_count=40)


@pytest.mark.slow
class TestLongHistories(Protocol.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=60)
