"""Files at random: nothing but our own errors comes out, soon, and nothing else is believed.

Hypothesis changes the bytes of one file, or one value of one document with all digests made right
again, in a dataset that is small enough to be whole in every example.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
from copy import deepcopy

import numpy as np
import pytest
from dataset_builders import FAILED_ROW, make_rows, write_dataset
from forging import Forgery
from hostile_lies import BASES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.rowtable import good_rows
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.digest import canonical_json
from wllm_ray.errors import WLLMError

pytestmark = pytest.mark.requirement("D-6")

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
FAST = settings(max_examples=60, suppress_health_check=CHECKS)
LONG = settings(max_examples=3000, suppress_health_check=CHECKS)


@functools.cache
def content_of(base, folder):
    """What a good dataset holds, by way of JSON: its rows, tokens and values."""
    write_dataset(open_store(folder / base), make_rows(5, failed=[FAILED_ROW]), **BASES[base])
    return held(load_dataset(folder / base, "d", verify="full"))


def held(dataset):
    files, manifest = dataset._files, dataset.manifest
    found = [dataset.row_ids, dataset.metadata, [ids.tolist() for ids in dataset.token_ids]]
    found += [{name: one.model_dump() for name, one in dataset.failures.items()}]
    found += [dataset.site(site).tolist() for site in manifest.sites]
    if manifest.trace:
        for shard in range(len(manifest.shards)):
            traces = files.traces(shard, good_rows(files.rows(shard)))
            found += [{s: v.tolist() for s, v in one.sites.items()} for one in traces]
    return json.loads(canonical_json(found))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    for base in BASES:
        content_of(base, folder)
    return folder


# --- mutations ------------------------------------------------------------------------------------

bits = st.integers(0, 7)
INTERESTING = [b"", b"\0", b"\xff" * 8, b"\x7f" + b"\xff" * 7, (1 << 40).to_bytes(8, "little")]


@st.composite
def damage(draw):
    """A change of bytes: flip, insert, delete, overwrite, repeat, cut off, or several of these."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "insert", "delete", "overwrite", "repeat", "cut"]),
                st.floats(0, 1, exclude_max=True),
                st.integers(1, 64),
                st.one_of(st.sampled_from(INTERESTING), st.binary(max_size=16)),
                bits,
            ),
            min_size=1,
            max_size=3,
        )
    )
    return functools.partial(functools.reduce, damaged, steps)


def damaged(data, step):
    how, share, count, new, bit = step
    at = int(share * len(data))
    head, tail = data[:at], data[at:]
    if how == "flip":
        return head + bytes([tail[0] ^ (1 << bit)]) + tail[1:] if tail else data
    return {
        "insert": head + new + tail,
        "delete": head + tail[count:],
        "overwrite": head + new + tail[len(new) :],
        "repeat": head + tail[:count] + tail,
        "cut": head,
    }[how]


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 3, 2**31, 2**63 - 1, 2**63, 2**64, 10**4299]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(["", "..", "/", "\0", "L0_resid_post", "0" * 64, "tolerance", "float16"]),
    st.just([]),
    st.just({}),
)


def places(value, path=()):
    """Where anything stands in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, one in items:
        yield from places(one, (*path, key))


@st.composite
def edits(draw, document):
    """A change of one place of a document: another value, its like from elsewhere, or gone."""
    path = draw(st.sampled_from([path for path in places(document) if path]))
    how = draw(st.sampled_from(["value", "elsewhere", "gone", "twice", "more", "less"]))
    parent = at(document, path[:-1])
    if how == "gone":
        del parent[path[-1]]
    elif how == "elsewhere":
        parent[path[-1]] = deepcopy(at(document, draw(st.sampled_from(list(places(document))))))
    elif how == "twice" and isinstance(parent, list):
        parent.append(parent[path[-1]])
    elif how in ("more", "less") and type(parent[path[-1]]) is int:
        parent[path[-1]] += 1 if how == "more" else -1
    else:
        parent[path[-1]] = draw(values)
    return path


def at(document, path):
    return functools.reduce(lambda value, key: value[key], path, document)


# --- what must hold -------------------------------------------------------------------------------


def expect_refused_or_the_same(root, expected):
    """Whatever is asked of it, a dataset says what it held or refuses in our own words."""
    for verify in ("lazy", "full", "off"):
        try:
            found = held(load_dataset(root, "d", verify=verify))
        except WLLMError as error:
            assert len(error.message) < 5000  # noqa: PT017 (either may be)
        else:
            assert verify == "off" or found == expected, verify
    try:
        verify_dataset(root, "d")
    except WLLMError:
        assert not (root / "datasets/d/manifest.json").is_file()


def copied(good, base, tmp_path):
    root = tmp_path / f"{next(_names)}"
    shutil.copytree(good / base, root)
    return root


_names = itertools.count()
ROLES = [
    ("npy", "features"),
    ("arrow", "features"),
    ("npy", "rows"),
    ("traces", "trace"),
    ("npy", "manifest.json"),
    ("npy", "spec.json"),
    ("npy", "shard-00000.receipt.json"),
]


def check_damaged_bytes(good, tmp_path, where, change, *, sealed):
    base, role = where
    root = copied(good, base, tmp_path)
    forgery = Forgery(root / "datasets/d")
    if ".json" in role:
        path = forgery.folder / role
        path.write_bytes(change(path.read_bytes()))
    elif sealed:  # the digests are right: the parsers see it all
        forgery.forge(role, change)
        forgery.seal()
    else:
        forgery.change(role, change)
    if sealed:
        expect_our_own_errors(root)
    else:
        expect_refused_or_the_same(root, content_of(base, good))
    shutil.rmtree(root)


def expect_our_own_errors(root):
    """What a liar seals may be another dataset, but it is one or none."""
    for verify in ("lazy", "off"):
        try:
            found = held(load_dataset(root, "d", verify=verify))
        except WLLMError as error:
            assert len(error.message) < 5000  # noqa: PT017 (either may be)
        else:
            assert len(found[0]) == 4
            assert all(np.isfinite(one).all() for one in found[4:5]) or verify == "off"
    verify_dataset(root, "d")


def check_an_edit(good, tmp_path, data, base):
    root = copied(good, base, tmp_path)
    forgery = Forgery(root / "datasets/d")
    before = json.dumps(forgery.manifest)
    data.draw(edits(forgery.manifest))
    try:
        forgery.seal()
    except (KeyError, TypeError, AttributeError, FileNotFoundError):
        (forgery.folder / "manifest.json").write_bytes(canonical_json(forgery.manifest))
    if json.dumps(forgery.manifest) != before:
        expect_our_own_errors(root)
    shutil.rmtree(root)


@FAST
@given(where=st.sampled_from(ROLES), change=damage(), sealed=st.booleans())
def test_damaged_bytes(good, tmp_path, where, change, sealed):
    check_damaged_bytes(good, tmp_path, where, change, sealed=sealed)


@FAST
@given(data=st.data(), base=st.sampled_from(sorted(BASES)))
def test_an_edited_manifest_whose_digests_are_right(good, tmp_path, data, base):
    check_an_edit(good, tmp_path, data, base)


@pytest.mark.slow
@LONG
@given(where=st.sampled_from(ROLES), change=damage(), sealed=st.booleans())
def test_damaged_bytes_at_length(good, tmp_path, where, change, sealed):
    check_damaged_bytes(good, tmp_path, where, change, sealed=sealed)


@pytest.mark.slow
@LONG
@given(data=st.data(), base=st.sampled_from(sorted(BASES)))
def test_edited_manifests_at_length(good, tmp_path, data, base):
    check_an_edit(good, tmp_path, data, base)
