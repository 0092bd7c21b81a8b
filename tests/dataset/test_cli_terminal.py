"""What commands write to a terminal: bars that go again, and no text that a terminal obeys."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from dataset_builders import MODEL, capture, make_rows, make_spec, rows_of, write_dataset
from typer.testing import CliRunner

from wllm_ray.cli import app
from wllm_ray.cli.reporting import say_error
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.errors import StorageError

pytestmark = pytest.mark.requirement("L-4", "U-4")

WLLM = [sys.executable, "-c", "from wllm_ray.cli import main; main()"]
HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\u202e\nstate  committed Größe 大"
SHOWN = r"evil\x1b]0;owned\x07\x1b[2J\u202e\nstate  committed Größe 大"


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


@pytest.fixture
def store(local):
    return local


def environment(**changes):
    """Of a plain terminal, whatever the tests run in."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return kept | {"TERM": "xterm", "COLUMNS": "120", "LANG": "C.UTF-8"} | changes


def in_terminal(*arguments, code=0, **changes):
    """Everything that a command sends to the terminal that both its streams are."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [*WLLM, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment(**changes)
    ) as process:
        os.close(slave)
        sent = b""
        try:
            while part := os.read(master, 65536):
                sent += part
        except OSError:
            pass  # Linux says so when nobody has the other end open any more
        finally:
            os.close(master)
    assert process.returncode == code, sent
    return sent.decode()


def plain(sent):
    """Without colours and bold letters."""
    return re.sub(r"\x1b\[[\d;]*m", "", sent)


def screen(sent):
    """The lines that are left on a terminal, which knows what a bar needs and nothing else."""
    lines, row, column = [""], 0, 0
    for command, text in re.findall(r"(\x1b\[\??[\d;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", sent):
        if text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        elif command == "\r":
            column = 0
        elif command == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif command.endswith("A"):
            row -= int(command[2:-1] or 1)
        elif command.endswith("K"):
            lines[row] = ""
        else:
            assert command[-1] in "mhl", command
    return [line.rstrip() for line in lines if line.strip()]


# --- the bar --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [["a"], ["a", "b"]])
def test_a_bar_is_shown_and_gone_and_results_stand_alone(root, store, ids):
    for one in ids:
        write_dataset(store, make_rows(6), dataset_id=one)
    sent = in_terminal("verify", root, *ids)
    for one in ids:
        # Label, and how many bytes are done, of how many.
        assert re.search(rf"{one} .*━.* ([\d.]+)/\1 KiB", plain(sent)), sent
    lines = screen(sent)
    assert [line.partition(":")[0] for line in lines] == [
        *ids,
        *["no fault in 2 datasets"][: len(ids) - 1],
    ]
    assert screen(in_terminal("verify", root, *ids, "--quiet")) == lines


def test_merging_shows_a_bar_too(root, store):
    write_dataset(store, make_rows(6), dataset_id="a")
    sent = in_terminal("merge", root, "a", "--into", "b")
    assert re.search(r"b .*━.* ([\d.]+)/\1 KiB", plain(sent)), sent
    (line,) = screen(sent)
    assert line.startswith("b: 6 rows in 2 shards, ")


def test_results_are_for_stdout_also_where_stderr_is_a_terminal(root, store):
    write_dataset(store, make_rows(6), dataset_id="a")
    master, slave = pty.openpty()
    ran = subprocess.run(
        [*WLLM, "verify", root, "a"],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment(),
        check=True,
    )
    os.close(slave)
    os.close(master)
    assert ran.stdout.decode().startswith("a: 8 files, ")


def test_a_label_is_no_markup_and_no_command(root, store):
    write_dataset(store, make_rows(6), dataset_id="a")
    for label in ("[/x]", "[red]b", "b\x1b]0;owned\x07"):
        sent = in_terminal("merge", root, "a", "--into", label, code=2)
        assert "internal_error" not in sent
        assert "error [" in screen(sent)[0]
        assert "\x1b]" not in sent


@pytest.mark.parametrize("changes", [{"TERM": "dumb"}, {"TERM": "dumb", "FORCE_COLOR": "1"}])
def test_a_terminal_that_moves_no_cursor_gets_no_bar(root, store, changes):
    write_dataset(store, make_rows(6), dataset_id="a")
    sent = in_terminal("verify", root, "a", **changes)
    assert sent.startswith("a: 8 files, ")
    assert "\x1b" not in sent


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_what_is_no_terminal_does_not_become_one(root, store, name):
    write_dataset(store, make_rows(6), dataset_id="a")
    ran = subprocess.run(
        [*WLLM, "verify", root, "a"],
        capture_output=True,
        env=environment(**{name: "1"}),
        check=True,
    )
    assert (ran.stderr, ran.stdout[:10]) == (b"", b"a: 8 files")


# --- text -----------------------------------------------------------------------------------------


@pytest.fixture
def hostile(store):
    """Documents that say what a terminal would obey: name of the model and of a library."""
    rows = make_rows(6)
    model = MODEL.model_copy(update={"name": HOSTILE})
    spec = make_spec(rows, dataset_id="d", model=model)
    create_spec(store, spec)
    for number in range(len(spec.shards)):
        part = rows_of(spec, rows, number)
        chunk = capture(part, spec)
        engine = chunk.description.model_copy(update={"versions": {HOSTILE: HOSTILE}})
        stage_shard(store, spec, number, part, [replace(chunk, description=engine)])
    return commit_manifest(store, "d")


def test_texts_of_a_manifest_are_shown_and_not_obeyed(root, hostile):
    sent = in_terminal("inspect", root, "d")
    assert "\x1b" not in plain(sent)
    lines = screen(sent)
    assert f"model                 {SHOWN}" in lines
    assert f"versions              {SHOWN}: {SHOWN}" in lines
    facts = CliRunner().invoke(app, ["inspect", root, "d", "--json"]).stdout
    assert json.loads(facts)["model"] == HOSTILE


def test_errors_quote_no_command_and_keep_their_lines(capsys):
    say_error(StorageError("no\x1b[2J space,\nGröße 大"))
    assert capsys.readouterr().err == ("error [storage_failed]: no\\x1b[2J space,\nGröße 大\n")


def test_names_of_files_are_shown_and_not_obeyed(root, store, tmp_path):
    """A name may hold any bytes: what is no text at all is not so much as listed."""
    write_dataset(store, make_rows(6))
    for name in (b"\xff\x1b[2J", "Größe大".encode()):
        (tmp_path / "root/datasets/d" / os.fsdecode(name)).write_bytes(b"four")
    for encoding in ("utf-8", "latin-1"):
        ran = subprocess.run(
            [*WLLM, "verify", root, "d"],
            capture_output=True,
            env=environment(PYTHONIOENCODING=encoding),
            check=True,
        )
        notes = ran.stdout.decode(encoding).splitlines()[1:]
        size = "Größe大" if encoding == "utf-8" else r"Größe\u5927"
        assert [note.split()[1] for note in notes] == [f"datasets/d/{size}:"]


def test_what_stdout_has_no_bytes_for_is_escaped(root, hostile):
    ran = subprocess.run(
        [*WLLM, "inspect", root, "d"],
        capture_output=True,
        env=environment(PYTHONIOENCODING="latin-1"),
        check=True,
    )
    text = ran.stdout.decode("latin-1")
    assert r"committed Größe \u5927" in text
    assert "traced_sites          \\u2013\n" in text  # the dash of what is not there
