"""A file of rows, read more than once with flat memory."""

import io
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import IntegrityError, InvalidInputError, NotFoundError
from wllm_ray.job.rows_file import RowsFile
from wllm_ray.rows import parse_rows, read_jsonl
from wllm_ray.validation import unknown_field


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(count: int) -> list[dict]:
    return [{"id": f"r{n}", "prompt": f"prompt {n}", "metadata": {"n": n}} for n in range(count)]


def problems_in_memory(data: bytes):
    try:
        parse_rows(read_jsonl(io.BytesIO(data)))
    except InvalidInputError as error:
        return error.code, error.details
    return None


@pytest.mark.requirement("L-6")
@given(
    st.lists(
        st.sampled_from(["a", "b", "c", "é", "bad", "", "malformed a", "malformed b"])
        | st.text(max_size=3),
        max_size=40,
    )
)
def test_a_file_is_judged_as_the_same_rows_in_memory(tmp_path_factory, ids):
    def line(one: str) -> bytes:
        if one.startswith("malformed "):
            return json.dumps({"id": one[-1], "prompt": 1}).encode()
        return b"nope" if one == "bad" else json.dumps({"id": one, "prompt": ""}).encode()

    lines = [line(one) for one in ids]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    rows = RowsFile(path)
    try:
        read, found = [row.id for row in rows()], None
    except InvalidInputError as error:
        read, found = [], (error.code, error.details)
    assert found == problems_in_memory(path.read_bytes())
    if found is None:
        assert read == ids
        assert [row.id for row in rows()] == ids


def test_many_repeated_ids_are_counted_and_the_first_are_listed(tmp_path):
    rows = [{"id": f"r{n % 600}", "prompt": ""} for n in range(1000)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InvalidInputError, match="400 malformed rows") as caught:
        list(RowsFile(path)())
    listed = [(one["line"], one["message"][-3:]) for one in caught.value.details["problems"]]
    assert listed[:2] == [(601, "e 1"), (602, "e 2")]
    assert len(listed) == 50


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_repeated_id_is_reported_in_the_same_round_as_what_else_is_wrong(tmp_path, in_memory):
    bad, good = {"id": "a", "prompt": 1}, {"id": "a", "prompt": "x"}
    path = write_rows(tmp_path / "rows.jsonl", [bad, good, {"id": "b", "promt": "x"}, bad])
    with pytest.raises(InvalidInputError, match="4 malformed rows") as caught:
        parse_rows(read_jsonl(io.BytesIO(path.read_bytes()))) if in_memory else RowsFile(
            path
        ).check()
    assert [one["message"] for one in caught.value.details["problems"]] == [
        "`prompt` must be a string",
        "`id` was used before, on line 1",
        unknown_field("promt", ["id", "prompt", "messages", "token_ids", "metadata"]),
        "`prompt` must be a string; `id` was used before, on line 1",
    ]


def test_repeated_ids_that_vanish_before_they_are_listed_are_no_success(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"id": "a", "prompt": ""}] * 2)
    reading = RowsFile(path)()
    next(reading), next(reading)
    path.write_text('{"id":"a","prompt":""}\n')
    with pytest.raises(IntegrityError, match="had repeated ids"):
        next(reading)


def test_a_file_that_is_changed_while_it_is_read_is_found_out(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", prompts(3))
    rows = RowsFile(path)
    list(rows())
    path.write_bytes(b"nope\n")
    with pytest.raises(IntegrityError, match="leave the file alone"):
        list(rows())


@pytest.mark.requirement("L-3")
def test_memory_grows_by_at_most_32_bytes_a_row(tmp_path):
    def peak(count: int) -> int:
        path = write_rows(tmp_path / f"{count}.jsonl", prompts(count))
        rows = RowsFile(path)
        tracemalloc.start()
        try:
            for _ in rows():
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    assert (peak(22_000) - peak(2_000)) / 20_000 < 32


@pytest.mark.requirement("L-5", "L-6")
def test_an_object_under_a_storage_root_is_read_like_a_file(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", prompts(3)).read_bytes()
    store = open_store("memory://inputs")
    store.put("rows.jsonl", data)
    store.put("bad.jsonl", data + b"nope\n")
    assert list(RowsFile("memory://inputs/rows.jsonl")()) == list(
        RowsFile(tmp_path / "rows.jsonl")()
    )
    with pytest.raises(InvalidInputError, match="line 4: not JSON"):
        RowsFile("memory://inputs/bad.jsonl").check()
    with pytest.raises(NotFoundError, match=r"no absent.jsonl under memory://inputs"):
        RowsFile("memory://inputs/absent.jsonl").check()


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize(
    "line",
    [b'{"id":"a","prompt":"x","prompt":"y"}', b'{"id":"a","messages":[{"n":1e400}]}', b"nope"],
)
def test_a_later_pass_is_as_strict_as_the_first(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id":"a","prompt":"x"}\n')
    rows = RowsFile(path)
    rows.check()
    path.write_bytes(line + b"\n")
    with pytest.raises(IntegrityError, match=r"line 1 of .* was well formed"):
        list(rows())


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match=r"no file .*absent.jsonl on the machine where"):
        RowsFile(tmp_path / "absent.jsonl")


def test_a_checked_file_is_not_checked_again(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", prompts(3))
    rows = RowsFile(path)
    rows.check()
    path.write_bytes(b"nope\n")
    with pytest.raises(IntegrityError, match=r"line 1 of .* was well formed"):
        list(rows())
