"""Inline answers as bytes, and back."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.fakes import fake_description
from wllm_ray.errors import CaptureError, NotOfferedError
from wllm_ray.records import RowFailure
from wllm_ray.schema import ActivationResponse, RowResult
from wllm_ray.wire import Inline, decode_arrow, encode_arrow, encode_json, encode_npy

WIDTHS = (3, 3)
UNEQUAL = (3, 1, 4)
FAILURE = RowFailure.of("too_long", "the row has 65 tokens and the model takes 64")


def inline(features: np.ndarray, lengths: list[int], widths=WIDTHS) -> Inline:
    rows, offset = [], 0
    for index, length in enumerate(lengths):
        rows.append(
            RowResult(
                id=f"r{index}é",
                index=index,
                offset=offset if length else None,
                length=length,
                request_sha256=f"{index:064x}",
                token_ids=[1, index] if length else None,
                token_sha256="2" * 64 if length else None,
                failure=None if length else FAILURE,
            )
        )
        offset += length
    described = fake_description()
    response = ActivationResponse(
        model=described.model,
        tokenizer=described.tokenizer,
        axes=("row", "site", "hidden"),
        sites=tuple(f"L{layer}_resid_post" for layer in range(len(widths))),
        site_widths=widths,
        position="all_prompt",
        capture_mode="replay",
        shape=(len(features), len(widths), widths[0] if len(set(widths)) == 1 else None),
        dtype="float32",
        rows=rows,
        features=None,
        dataset=None,
        fingerprint=described.fingerprint,
        versions=described.versions,
        selftest=described.selftest,
        timings={"capture_s": 0.5},
    )
    return Inline(response, features)


def random_features(rows: int, widths=WIDTHS) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, sum(widths)), dtype=np.float32)


@pytest.mark.requirement("H-2")
@pytest.mark.parametrize("widths", [WIDTHS, UNEQUAL, (5,)])
@pytest.mark.parametrize("lengths", [[1, 1], [1, 0, 1], [0, 0], [2, 0, 3], [1] * 300])
def test_an_arrow_stream_reads_back_to_the_same_answer(lengths, widths):
    sent = inline(random_features(sum(lengths), widths), lengths, widths)
    got = decode_arrow(encode_arrow(sent))
    assert got.response == sent.response
    assert got.features.dtype == np.float32
    assert got.features.tobytes() == sent.features.tobytes()
    assert got.features.shape == sent.features.shape


@pytest.mark.requirement("H-2")
def test_the_arrow_column_holds_the_feature_rows_of_each_row():
    features = random_features(5, UNEQUAL)
    table = pa.ipc.open_stream(encode_arrow(inline(features, [2, 0, 3], UNEQUAL))).read_all()
    first, none, last = table.column("features").to_pylist()
    assert np.array_equal(np.array(first + last, np.float32), features)
    assert none == []
    assert table.column("offset").to_pylist() == [0, None, 2]
    assert table.column("length").to_pylist() == [2, 0, 3]


@pytest.mark.requirement("H-2")
def test_a_site_is_its_own_columns():
    features = np.arange(16, dtype=np.float32).reshape(2, 8)
    sent = inline(features, [2], UNEQUAL)
    assert [sent.site(n).tolist()[1] for n in range(3)] == [[8, 9, 10], [11], [12, 13, 14, 15]]
    assert all(np.shares_memory(sent.site(n), features) for n in range(3))
    assert json.loads(encode_json(sent))["features"][1] == [[8, 9, 10], [11], [12, 13, 14, 15]]


@pytest.mark.requirement("H-2")
def test_npy_cannot_carry_sites_of_different_widths_and_names_them():
    with pytest.raises(NotOfferedError, match="L0_resid_post has 3, L1_resid_post has 1") as caught:
        encode_npy(inline(random_features(1, UNEQUAL), [1], UNEQUAL))
    assert caught.value.code == "widths_not_representable"


@pytest.mark.requirement("H-2")
@given(
    arrays(
        np.float32,
        (4, sum(WIDTHS)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_the_three_forms_agree_to_the_bit(features):
    sent = inline(features, [1] * 4)
    arrow = decode_arrow(encode_arrow(sent)).features
    npy = np.load(io.BytesIO(encode_npy(sent)), allow_pickle=False)
    plain = np.array(json.loads(encode_json(sent))["features"], dtype=np.float32)
    assert npy.shape == plain.shape == (4, 2, 3)
    assert arrow.tobytes() == npy.tobytes() == plain.tobytes() == features.tobytes()


@pytest.mark.requirement("H-2")
def test_npy_cannot_carry_failures_and_says_which_there_are():
    with pytest.raises(NotOfferedError, match="1 of 2 rows failed") as caught:
        encode_npy(inline(random_features(1), [1, 0]))
    assert caught.value.code == "failures_not_representable"
    assert caught.value.details["failures"] == [{"id": "r1é", "index": 1, **FAILURE.model_dump()}]


def test_json_is_the_response_with_its_features():
    sent = inline(random_features(1), [1])
    got = ActivationResponse.model_validate_json(encode_json(sent))
    assert got.model_copy(update={"features": None}) == sent.response


def other_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        other_stream(pa.table({"x": [1]})),
        other_stream(pa.table({"x": [1]}).replace_schema_metadata({"wllm_ray.response": "{}"})),
        other_stream(pa.table({"x": [1]}).replace_schema_metadata({"wllm_ray.response": "[]"})),
        encode_arrow(inline(random_features(2), [1, 1]))[:-200],
    ],
    ids=["empty", "html", "no response", "empty response", "a list", "cut short"],
)
def test_anything_else_is_a_protocol_error(data):
    with pytest.raises(CaptureError, match="expected an Arrow stream") as caught:
        decode_arrow(data)
    assert caught.value.code == "protocol_error"


@pytest.mark.parametrize("lie", [{"shape": (3, 2, 3)}, {"site_widths": (3, 4)}])
def test_a_shape_that_the_data_do_not_have_is_a_protocol_error(lie):
    sent = inline(random_features(2), [1, 1])
    lying = Inline(sent.response.model_copy(update=lie), sent.features)
    with pytest.raises(CaptureError, match="versions may differ"):
        decode_arrow(encode_arrow(lying))
