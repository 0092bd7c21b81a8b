"""From what is asked to a spec: how rows fall into shards, and how sites are laid out."""

from __future__ import annotations

import numpy as np
import pytest
from dataset_builders import description, make_rows

from wllm_ray.dataset.writing.spec import build_spec
from wllm_ray.digest import requests_digest
from wllm_ray.errors import InvalidInputError
from wllm_ray.plan import ShardLimits
from wllm_ray.records import CaptureIdentity, InputRow, RowFailure
from wllm_ray.schema import StorageOptions
from wllm_ray.tokens import make_records, tokens_bound

SITES = ("embed", "L1_attn_out_prelinear")
ROW_BYTES = 4 * (4 + 6)  # one feature row of both sites


def identity(position, sites=SITES):
    return CaptureIdentity(
        model_revision="a" * 40,
        tokenizer_revision="b" * 40,
        chat_template_sha256=None,
        sites=sites,
        position=position,
        capture_mode="replay",
    )


def records(contents, position="all_prompt", **options):
    rows = [InputRow(f"r{index}", content) for index, content in enumerate(contents)]
    return [record._replace(**options) for record in make_records(rows, identity(position))]


def spec_of(rows, position="all_prompt", max_rows=4096, feature_rows=10**6, **options):
    return build_spec(
        description(),
        identity(position),
        rows,
        site_widths=options.pop("site_widths", (4, 6)),
        dataset_id=options.pop("dataset_id", "d"),
        limits=ShardLimits(max_rows, feature_rows * ROW_BYTES),
        storage=StorageOptions(**options),
    )


def counts(spec):
    return [shard.rows for shard in spec.shards]


IDS = [{"token_ids": [1] * n} for n in (3, 4, 5, 30, 2, 2)]


@pytest.mark.requirement("D-8")
def test_ragged_rows_are_cut_by_the_feature_rows_that_they_may_have():
    assert counts(spec_of(records(IDS), feature_rows=12)) == [3, 1, 2]
    assert counts(spec_of(records(IDS), feature_rows=11)) == [2, 1, 1, 2]
    assert counts(spec_of(records(IDS), max_rows=2, feature_rows=12)) == [2, 1, 1, 2]
    assert counts(spec_of(records(IDS))) == [6]


@pytest.mark.requirement("D-8")
@pytest.mark.parametrize(
    ("position", "expected"),
    [
        ("last_prompt", [4, 2]),
        ("first", [4, 2]),
        ("mean_prompt", [4, 2]),
        ("index:-1", [4, 2]),
        ("index:0,-1", [2, 2, 2]),
        ("index:0,1,-1", [1] * 6),
    ],
)
def test_rows_of_fixed_length_are_cut_by_number_whatever_their_tokens(position, expected):
    assert counts(spec_of(records(IDS), position, feature_rows=4)) == expected


@pytest.mark.requirement("D-8", "D-9")
@pytest.mark.parametrize(
    ("position", "dtype", "fits"),
    [
        # The first three rows: vectors of 8 values, and 64 bytes of traces for each of 12 tokens.
        ("last_prompt", "float32", 3 * 32 + 12 * 64),
        ("all_prompt", "float32", 12 * 32 + 12 * 64),
        # Traces are float32 whatever the features are.
        ("last_prompt", "float16", 3 * 16 + 12 * 64),
    ],
)
def test_features_and_traces_together_keep_the_bound(position, dtype, fits):
    sites = ("L0_resid_post", "L2_resid_post")
    for spare, expected in ((0, [3, 1, 2]), (-1, [2, 1, 1, 2])):
        spec = build_spec(
            description(),
            identity(position, sites),
            records(IDS, position),
            site_widths=(4, 4),
            dataset_id="d",
            limits=ShardLimits(4096, fits + spare),
            storage=StorageOptions(full_trace=True, storage_dtype=dtype),
        )
        assert spec.trace.site_widths == (4, 4, 4, 4)
        assert counts(spec) == expected


@pytest.mark.requirement("D-8", "S-4")
def test_the_cut_does_not_depend_on_who_tokenises_or_on_what_failed():
    """A client without a tokenizer, and a server that knows ids and failures, plan alike."""
    contents = [{"prompt": "x" * n} for n in (5, 20, 40, 1, 100)]
    bare = spec_of(records(contents), feature_rows=80)
    ids = np.arange(3, dtype=np.int32)
    assert spec_of(records(contents, token_ids=ids), feature_rows=80) == bare
    failed = RowFailure.of("too_long", "x")
    assert spec_of(records(contents, failure=failed), feature_rows=80) == bare
    assert counts(bare) == [2, 2, 1]


@pytest.mark.requirement("D-8", "D-3")
def test_the_cut_does_not_depend_on_the_length_that_a_deployment_takes():
    rows = records([{"prompt": "x" * 100}] * 3)
    asked = identity("all_prompt")
    limits = ShardLimits(4096, 240 * ROW_BYTES)
    plans = [
        build_spec(
            description().model_copy(update={"max_model_len": length}),
            asked,
            rows,
            site_widths=(4, 6),
            dataset_id="d",
            limits=limits,
            storage=StorageOptions(),
        )
        for length in (64, 128, 100_000)
    ]
    assert [counts(plan) for plan in plans] == [[2, 1]] * 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"token_ids": []}, 0),
        ({"token_ids": [1, 2, 3]}, 3),
        ({"prompt": ""}, 16),
        ({"prompt": "aé🙂"}, 7 + 16),
        ({"prompt": "\ud83d"}, 3 + 16),
        ({"messages": []}, 1024),
        ({"messages": [{"role": "user", "content": "hé"}] * 2}, 2 * (4 + 3 + 64) + 1024),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}], "n": 1}]},
            4 + 4 + 3 + 64 + 1024,
        ),
    ],
)
def test_what_is_known_of_a_row_before_it_is_tokenised(content, expected):
    assert tokens_bound(content) == expected


def test_a_shard_is_bound_to_the_requests_in_it():
    rows = make_rows(5)
    spec = spec_of(rows, "last_prompt", max_rows=3)
    assert [shard.first_row for shard in spec.shards] == [0, 3]
    digests = [row.request_digest for row in rows]
    assert spec.shards[0].requests_sha256 == requests_digest(digests[:3])
    assert spec.shards[1].requests_sha256 == requests_digest(digests[3:])
    assert (spec.rows, spec.max_rows_per_shard) == (5, 3)


def test_rows_are_read_once_and_one_shard_at_a_time():
    spec = spec_of(iter(make_rows(5)), "last_prompt", max_rows=2)
    assert counts(spec) == [2, 2, 1]


@pytest.mark.requirement("D-1")
@pytest.mark.parametrize(
    ("asked", "widths", "layout"),
    [
        ("auto", (4, 4), "stacked"),
        ("auto", (4, 6), "per_site"),
        ("stacked", (4, 4), "stacked"),
        ("per_site", (4, 4), "per_site"),
        ("per_site", (4, 6), "per_site"),
    ],
)
def test_layout(asked, widths, layout):
    spec = spec_of(make_rows(2), site_widths=widths, shard_layout=asked)
    assert (spec.shard_layout, spec.site_widths) == (layout, widths)


@pytest.mark.requirement("D-1")
def test_sites_of_different_widths_cannot_be_stacked():
    match = r"needs sites of one width \(embed has 4, L1_attn_out_prelinear has 6\); ask for `per_s"
    with pytest.raises(InvalidInputError, match=match) as error:
        spec_of(make_rows(2), shard_layout="stacked")
    assert error.value.code == "widths_not_representable"


def test_an_id_is_made_from_everything_that_is_asked():
    rows = make_rows(4)
    specs = [
        spec_of(rows, dataset_id=None),
        spec_of(rows, "first", dataset_id=None),
        spec_of(rows[:3], dataset_id=None),
        spec_of(rows, dataset_id=None, max_rows=2),
        spec_of(rows, dataset_id=None, site_widths=(4, 8)),
        spec_of(rows, dataset_id=None, site_widths=(4, 4)),
        spec_of(rows, dataset_id=None, site_widths=(4, 4), shard_layout="per_site"),
    ]
    assert len({spec.dataset_id for spec in specs}) == len(specs)
    assert spec_of(rows, dataset_id=None) == specs[0]
    with pytest.raises(InvalidInputError, match="a dataset id starts with"):
        spec_of(rows, dataset_id="../x")
