"""``wllm activations`` against a whole application on a loopback port."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.fakes import (
    HIDDEN_SIZE,
    MODEL,
    NUM_LAYERS,
    Application,
    FakeEngine,
    fake_description,
    fake_features,
    serving,
)
from wllm_ray.cli import app as wllm
from wllm_ray.client import WLLMClient
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.extraction import ExtractionLimits
from wllm_ray.records import RowFailure
from wllm_ray.sites import HookSite, parse_site

WLLM = [sys.executable, "-c", "from wllm_ray.cli import main; main()"]
ROOT = Path(__file__).resolve().parents[2]


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(count: int) -> list[dict]:
    return [{"id": f"r{n}", "prompt": f"prompt {n}", "metadata": {"n": n}} for n in range(count)]


def posts(app: Application) -> int:
    return sum(method == "POST" for method, _ in app.requests)


class Job:
    """One command line; keyword arguments replace or add options."""

    def __init__(self, address: str, rows: Path, output: Path) -> None:
        self.rows, self.output = rows, output
        self.options = {
            "base-url": address,
            "model": MODEL,
            "layer": "1",
            "output": str(output),
            "dataset-id": "d",
            "patience": "0",
        }

    def arguments(self, *flags: str, **options: str) -> list[str]:
        wanted = self.options | {name.replace("_", "-"): value for name, value in options.items()}
        pairs = [part for name, value in wanted.items() for part in (f"--{name}", value)]
        return ["activations", str(self.rows), *pairs, *flags]

    def run(self, *flags: str, env=None, **options: str):
        result = CliRunner().invoke(wllm, self.arguments("--quiet", *flags, **options), env=env)
        assert not result.exception or isinstance(result.exception, SystemExit), result.exception
        result.summary = json.loads(result.stdout.splitlines()[-1]) if result.stdout else None
        return result

    def start(self, *flags: str, **options: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*WLLM, *self.arguments(*flags, **options)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def dataset(self, dataset_id: str = "d"):
        return load_dataset(self.output, dataset_id, verify="full")

    def receipts(self) -> list[str]:
        return sorted(path.name for path in self.output.glob("datasets/d/*.receipt.json"))

    def files(self) -> dict[str, tuple[int, bytes]]:
        return {
            str(path.relative_to(self.output)): (path.stat().st_mtime_ns, path.read_bytes())
            for path in self.output.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def app():
    return Application()


@pytest.fixture
def job(app, tmp_path):
    with serving(app) as address:
        rows = write_rows(tmp_path / "rows.jsonl", prompts(10))
        yield Job(address, rows, tmp_path / "out")


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.requirement("L-3")
def test_a_file_becomes_a_dataset_on_this_machine(job):
    result = job.run(rows_per_shard="4")
    assert result.exit_code == 0, result.stderr
    dataset = job.dataset()
    assert dataset.row_ids == [f"r{n}" for n in range(10)]
    assert dataset.metadata[3] == {"n": 3}
    ids = np.array(list(b"prompt 7"), np.int32)
    expected = fake_features(ids, [HookSite(1, "resid_post")])
    assert np.array_equal(dataset.features[7], expected[0])
    assert dataset.token_ids[7].tolist() == ids.tolist()
    assert result.summary["status"] == "committed"
    assert result.summary["manifest_sha256"] == dataset.manifest.manifest_sha256
    assert (result.summary["rows"], result.summary["shards"]) == (10, 3)
    assert json.loads((job.output / "runs/d/failures.json").read_bytes()) == []
    assert json.loads((job.output / "runs/d/summary.json").read_bytes())["rows_ok"] == 10


@pytest.mark.requirement("L-3", "D-3")
@pytest.mark.parametrize("batch_size", ["auto", "1", "3"])
def test_the_digest_is_that_of_a_dataset_which_the_server_commits(tmp_path, batch_size):
    app = Application(open_store(tmp_path / "server"))
    rows = [*prompts(5), {"id": "bad", "prompt": "x" * 99}]
    with serving(app) as address:
        job = Job(address, write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out")
        assert job.run(batch_size=batch_size).exit_code == 1
        with WLLMClient(address, tmp_path / "server") as client:
            there = client.extract_activations(
                MODEL,
                [row["prompt"] for row in rows],
                [row["id"] for row in rows],
                [row.get("metadata", {}) for row in rows],
                layers=[1],
                persist=True,
            )
    assert job.dataset().manifest.content_sha256 == there.manifest.content_sha256


def test_one_row_is_not_one_rows(app, job):
    write_rows(job.rows, prompts(1))
    lost = RowFailure.of("position_missing", "lost")
    app.engine.fault = lambda _row: lost
    assert "1 of 1 row failed for reasons that may pass" in job.run().stderr
    app.engine.fault = lambda _row: None
    assert "dataset d: 1 row, 0 failed, committed" in job.run().stderr


@pytest.mark.requirement("L-3")
def test_without_an_id_the_same_request_finds_the_same_dataset(job):
    del job.options["dataset-id"]
    first, second = job.run(), job.run()
    assert first.summary["dataset_id"].startswith("ds-")
    assert second.summary["dataset_id"] == first.summary["dataset_id"]
    assert second.summary["shards_resumed"] == 1


@pytest.mark.requirement("L-3", "D-10")
def test_rows_that_cannot_be_run_are_reported_and_the_rest_succeeds(job):
    extra = [{"id": "long", "prompt": "x" * 99}, {"id": "no", "token_ids": [999]}]
    write_rows(job.rows, [*prompts(2), *extra])
    for _ in range(2):
        result = job.run()
        assert result.exit_code == 1
        assert result.summary["failures_by_code"] == {"token_out_of_vocabulary": 1, "too_long": 1}
        assert "row 2 'long': too_long (permanent)" in result.stderr
        failures = json.loads((job.output / "runs/d/failures.json").read_bytes())
        assert [(one["index"], one["id"]) for one in failures] == [(2, "long"), (3, "no")]
    assert job.dataset().row_ids == ["r0", "r1"]


@pytest.mark.requirement("L-3", "D-10")
def test_rows_that_may_pass_leave_no_manifest_and_running_again_finishes(app, job):
    lost = RowFailure.of("position_missing", "lost")
    app.engine.fault = lambda row: lost if bytes(row.token_ids.tolist()) == b"prompt 5" else None
    result = job.run(rows_per_shard="4")
    assert result.exit_code == 1
    assert result.summary["status"] == "incomplete"
    assert result.summary["rows_to_retry"] == 1
    assert "2 of 3 shards are kept, run the same command again" in result.stderr
    failures = json.loads((job.output / "runs/d/failures.json").read_bytes())
    assert [(one["id"], one["permanent"]) for one in failures] == [("r5", False)]
    assert not (job.output / "datasets/d/manifest.json").exists()
    app.engine.fault = lambda _row: None
    again = job.run(rows_per_shard="4")
    assert (again.exit_code, again.summary["shards_resumed"]) == (0, 2)
    assert (result.summary["shards_written"], again.summary["shards_written"]) == (2, 1)
    assert json.loads((job.output / "runs/d/failures.json").read_bytes()) == []


@pytest.mark.requirement("L-3", "D-4")
def test_shards_that_another_run_wrote_with_other_numbers_are_counted_and_told(job):
    """Said once on stderr; the dataset is committed all the same."""
    patched = (
        "from tests.fakes import rivalled; from wllm_ray.cli import main;"
        "from wllm_ray.client import job; job.stage_shard = rivalled(job.stage_shard, {1}); main()"
    )
    command = [sys.executable, "-c", patched, *job.arguments("--quiet", rows_per_shard="4")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    summary = json.loads(done.stdout)
    counts = [summary[f"shards_{what}"] for what in ("resumed", "written", "superseded", "staged")]
    assert counts == [0, 2, 1, 3]
    assert done.stderr.count("shard 1 stood already when this run had captured it") == 1
    stored = json.loads((job.output / "runs/d/summary.json").read_bytes())
    assert "shards_superseded" not in stored  # of a run, and not of the state
    again = job.run(rows_per_shard="4").summary
    assert (again["shards_resumed"], again["shards_superseded"]) == (3, 0)


@pytest.mark.parametrize(
    ("options", "sites"),
    [
        ({"layer": "0,2"}, ["L0_resid_post", "L2_resid_post"]),
        ({"layer": "all"}, [f"L{n}_resid_post" for n in range(NUM_LAYERS)]),
        ({"layer": "3", "site": "resid_pre"}, ["L3_resid_pre"]),
        ({"hook-site": "L0_resid_mid"}, ["L1_resid_post", "L0_resid_mid"]),
        ({"sites": "blocks.2.hook_resid_pre, L0_block"}, ["L2_resid_pre", "L0_resid_post"]),
        ({"position": "last-prompt"}, ["L1_resid_post"]),
    ],
)  # fmt: skip
def test_sites_are_asked_for_in_any_spelling(job, options, sites):
    if "sites" in options:
        del job.options["layer"]
    result = job.run(**options)
    assert result.exit_code == 0, result.stderr
    assert list(job.dataset().manifest.sites) == sites
    assert job.dataset().manifest.position == "last_prompt"


@pytest.mark.requirement("L-3", "C-8")
@pytest.mark.parametrize(
    ("position", "stored", "lengths"),
    [
        ("first", "first", [1, 1]),
        ("all_prompt", "all_prompt", [3, 4]),
        ("mean_prompt", "mean_prompt", [1, 1]),
        ("index:0,-1", "index:0,-1", [2, 2]),
        ("index:-1, 0", "index:-1,0", [2, 2]),
        ("index:3", "index:3", [1]),
    ],
)
def test_positions_are_asked_for_as_text(job, position, stored, lengths):
    write_rows(job.rows, [{"id": "a", "prompt": "one"}, {"id": "b", "prompt": "four"}])
    result = job.run(position=position)
    assert result.exit_code == (1 if len(lengths) < 2 else 0), result.stderr
    dataset = job.dataset()
    assert dataset.manifest.position == stored
    assert np.diff(dataset.offsets).tolist() == lengths
    last = np.array(list(b"four"), np.int32)
    expected = fake_features(last, [HookSite(1, "resid_post")], stored)
    assert np.array_equal(dataset.features[-len(expected) :], expected)
    if len(lengths) < 2:
        assert result.summary["failures_by_code"] == {"position_out_of_range": 1}


@pytest.mark.requirement("L-3", "D-1")
@pytest.mark.parametrize(
    ("options", "layout", "files"),
    [
        ({"hook-site": "L1_attn_out_prelinear"}, "per_site", 2),
        ({"hook-site": "embed"}, "stacked", 1),
        ({"hook-site": "embed", "shard-layout": "per_site"}, "per_site", 2),
    ],
)
def test_sites_share_a_file_or_have_one_each(job, options, layout, files):
    result = job.run(position="all_prompt", **options)
    assert result.exit_code == 0, result.stderr
    dataset = job.dataset()
    assert dataset.manifest.shard_layout == layout
    assert len(list(job.output.glob("datasets/d/*.npy"))) == files
    site = parse_site(options["hook-site"])
    row = np.array(list(b"prompt 3"), np.int32)
    start, stop = dataset.offsets[3:5]
    assert np.array_equal(
        dataset.site(str(site))[start:stop], fake_features(row, [site], "all_prompt")
    )


def test_help_says_what_each_position_gives():
    wide = {"COLUMNS": "200"}
    text = " ".join(CliRunner().invoke(wllm, ["activations", "--help"], env=wide).stdout.split())
    for words in ("last_prompt", "first", "all_prompt", "mean_prompt", "index:0,-1", "per_site"):
        assert words in text


def test_layers_may_be_given_one_by_one(job):
    assert job.run("--layer", "3", "--layer", "0").exit_code == 0
    assert job.dataset().manifest.sites == ("L1_resid_post", "L3_resid_post", "L0_resid_post")


@pytest.mark.requirement("H-2")
def test_requests_are_cut_to_the_servers_bounds(tmp_path):
    app = Application(limits=ExtractionLimits(max_inline_bytes=3 * HIDDEN_SIZE * 4))
    with serving(app) as address:
        job = Job(address, write_rows(tmp_path / "rows.jsonl", prompts(10)), tmp_path / "out")
        assert job.run().exit_code == 0
    assert posts(app) == 4


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.requirement("L-6")
def test_a_malformed_line_refuses_the_whole_file_before_anything_is_sent(app, job):
    data = job.rows.read_bytes() + b'\n{"id":"x"}\n{"id":"r3","prompt":"SECRET"}\nnope\n'
    job.rows.write_bytes(data)
    result = job.run()
    assert result.exit_code == 2
    assert "error [invalid_rows] in parse_rows: 3 malformed rows, nothing was run" in result.stderr
    assert "  line 12: exactly one of" in result.stderr
    assert "  line 13: `id` was used before, on line 4" in result.stderr
    assert "  line 14: not JSON" in result.stderr
    assert "SECRET" not in result.output
    assert result.summary["error"]["code"] == "invalid_rows"
    assert posts(app) == 0
    assert not (job.output / "datasets").exists()


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("data", [b"", b"\n\n"])
def test_a_file_without_rows_is_an_error(job, data):
    job.rows.write_bytes(data)
    result = job.run()
    assert (result.exit_code, result.summary["error"]["code"]) == (2, "no_rows")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"model": "other"}, "model_not_found"),
        ({"layer": "9"}, "layer_out_of_range"),
        ({"layer": "-1"}, "invalid_argument"),
        ({"layer": "all,1"}, "invalid_argument"),
        ({"site": "mamba_out"}, "site_not_offered"),
        ({"hook-site": "L1_block"}, "invalid_site"),
        ({"layer": "2", "site": "attn_out"}, "site_not_offered"),
        ({"position": "all_generated"}, "position_not_offered"),
        ({"position": "everywhere"}, "invalid_position"),
        ({"position": "index:"}, "invalid_position"),
        ({"position": "index:0,0"}, "invalid_position"),
        ({"shard-layout": "flat"}, "invalid_argument"),
        (
            {"hook-site": "L1_attn_out_prelinear", "shard-layout": "stacked"},
            "widths_not_representable",
        ),
        ({"batch-size": "0"}, "invalid_argument"),
        ({"dataset-id": "../up"}, None),
        ({"output": "ftp://x"}, "invalid_argument"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_sent(app, job, options, code):
    result = job.run(**options)
    assert result.exit_code == 2
    assert result.summary is None or code in (None, result.summary["error"]["code"])
    assert "Traceback" not in result.stderr
    assert posts(app) == 0


GIVEN = ("/dev/null", "--model", "m", "--output", "o")


@pytest.mark.requirement("L-3")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/no/such/file", "--model", "m", "--output", "o"], "'/no/such/file' does not exist"),
        (["/dev/null"], "Missing option '--model'"),
        ([], "Missing argument 'rows'"),
        (["--colour"], "No such option: --colour"),
        ([*GIVEN, "--patience", "x"], "for '--patience'"),
        ([*GIVEN, "--shard-format", "x"], "for '--shard-format': 'x' is not one of 'npy', 'arrow'"),
        ([*GIVEN, "--storage-dtype", "bfloat16"], "for '--storage-dtype': 'bfloat16' is not asked"),
        ([*GIVEN, "--storage-dtype", "bfloat16"], "ask for `native`"),
        ([*GIVEN, "--storage-dtype", "x"], "'x' is not one of float32, native, float16"),
    ],
)
def test_usage_errors_are_two_and_end_with_json_as_well(arguments, said):
    result = CliRunner().invoke(wllm, ["activations", *arguments])
    summary = json.loads(result.stdout)
    assert (result.exit_code, summary["exit_code"], summary["status"]) == (2, 2, "error")
    assert summary["error"]["code"] == "invalid_argument"
    assert said in summary["error"]["message"]
    assert "Usage: " in result.stderr


def test_help_is_no_error():
    result = CliRunner().invoke(wllm, ["activations", "--help"])
    assert result.exit_code == 0
    assert '"status"' not in result.stdout


@pytest.mark.requirement("L-3")
def test_a_fault_of_the_program_ends_with_json_as_well(job, monkeypatch):
    monkeypatch.setattr("wllm_ray.cli.activations.batch_size_of", lambda _: 1 / 0)
    result = job.run()
    assert (result.exit_code, result.summary["error"]["code"]) == (2, "internal_error")


def test_a_pipe_is_refused_because_it_is_read_twice(job, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    job.rows = tmp_path / "pipe"
    result = job.run()
    assert result.exit_code == 2
    assert "expected a regular file" in result.stderr


@pytest.mark.requirement("H-7")
def test_the_key_comes_from_the_environment_and_is_never_shown(tmp_path):
    app = Application(api_key="SECRET-KEY")
    with serving(app) as address:
        job = Job(address, write_rows(tmp_path / "rows.jsonl", prompts(1)), tmp_path / "out")
        refused = job.run(env={"WLLM_API_KEY": "SECRET-WRONG"})
        taken = job.run(env={"WLLM_API_KEY": "SECRET-KEY"})
    assert (refused.exit_code, taken.exit_code) == (2, 0)
    assert refused.summary["error"]["code"] == "unauthorized"
    assert "the API key that was sent is not the one of this application" in refused.stderr
    assert "set WLLM_API_KEY to the application's key" in refused.stderr
    assert "SECRET" not in refused.output + taken.output


@pytest.mark.requirement("L-3")
def test_an_output_that_cannot_be_written_is_an_error(job, tmp_path):
    (tmp_path / "file").write_text("")
    result = job.run(output=str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert f"under the storage root {tmp_path / 'file' / 'below'}" in result.stderr
    assert result.summary["error"]["code"] == "storage_failed"


# --- again ----------------------------------------------------------------------------------------


@pytest.mark.requirement("L-3", "D-5")
def test_a_committed_dataset_is_left_alone(app, job):
    assert job.run(rows_per_shard="4").exit_code == 0
    before, ran = job.files(), app.engine.captured.total()
    app.requests.clear()
    result = job.run(rows_per_shard="4")
    assert result.exit_code == 0
    assert app.requests == [("GET", "/v1/models"), ("GET", "/v1/extraction-schema")]
    assert job.files() == before
    assert app.engine.captured.total() == ran
    assert (result.summary["shards_resumed"], result.summary["shards_written"]) == (3, 0)


def changed_row(rows):
    return [row | {"prompt": "other"} if row["id"] == "r5" else row for row in rows]


def changed_metadata(rows):
    return [row | {"metadata": {"n": 5.0}} if row["id"] == "r5" else row for row in rows]


def other_order(rows):
    return [*rows[:5], rows[6], rows[5], *rows[7:]]


def appended(rows):
    return [*rows, {"id": "new", "prompt": "new"}]


@pytest.mark.requirement("L-3", "L-6", "D-5")
@pytest.mark.parametrize(
    ("change", "named"),
    [(changed_row, "r5"), (changed_metadata, "r5"), (other_order, "r6"), (appended, "new")],
)
def test_another_input_under_the_same_id_fails_closed_and_names_the_rows(app, job, change, named):
    assert job.run(rows_per_shard="4").exit_code == 0
    before = job.files()
    write_rows(job.rows, change(prompts(10)))
    result = job.run(rows_per_shard="4")
    assert result.exit_code == 2
    assert result.summary["error"]["code"] == "dataset_immutable"
    assert named in result.summary["error"]["details"]["rows"]
    assert f"'{named}'" in result.stderr
    assert job.files() == before
    assert posts(app) == 3


@pytest.mark.requirement("L-3")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"layer": "2"}, "sites[0] (stored 'L1_resid_post', asked 'L2_resid_post')"),
        ({"position": "first"}, "position (stored 'last_prompt', asked 'first')"),
        ({"rows-per-shard": "5"}, "max_rows_per_shard (stored 4, asked 5)"),
    ],
)
def test_other_options_under_the_same_id_fail_closed_and_name_the_field(job, options, field):
    assert job.run(rows_per_shard="4").exit_code == 0
    result = job.run(**{"rows-per-shard": "4"} | options)
    assert result.exit_code == 2
    details = result.summary["error"]["details"]
    name = field.partition(" ")[0].partition("[")[0]
    assert (list(details["fields"]), details["shards"], details["rows"]) == ([name], [], [])
    assert f"what differs: field {field}. Use another dataset id" in result.stderr


def test_another_model_under_the_same_id_fails_closed(app, job):
    assert job.run().exit_code == 0
    model = app.service.description.model.model_copy(update={"revision": "sha256:" + "7" * 64})
    app.service.description = fake_description(model=model)
    result = job.run()
    assert result.exit_code == 2
    assert "model" in result.summary["error"]["details"]["fields"]
    assert "field model.revision (stored 'sha256:" in result.stderr


@pytest.mark.requirement("L-3", "D-5")
@pytest.mark.parametrize("suffix", [".npy", ".rows.arrow", ".receipt.json"])
@pytest.mark.parametrize("committed", [True, False])
def test_a_damaged_shard_fails_closed_and_is_named(job, suffix, committed):
    assert job.run(rows_per_shard="4").exit_code == 0
    if not committed:
        (job.output / "datasets/d/manifest.json").unlink()
    damaged = next(job.output.glob(f"datasets/d/shard-00001*{suffix}"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    result = job.run(rows_per_shard="4")
    assert result.exit_code == 2
    assert damaged.name in result.stderr


@pytest.mark.requirement("L-3")
def test_without_a_site_the_options_are_named(job):
    del job.options["layer"]
    result = job.run()
    assert (result.exit_code, result.summary["error"]["code"]) == (2, "invalid_site")
    assert "give --layer (`--layer 12`, `--layer all`) or --hook-site" in result.stderr


def test_the_bar_does_not_stay_before_an_error(job):
    job.rows.write_text("nope\n")
    result = CliRunner().invoke(wllm, job.arguments())
    assert result.exit_code == 2
    assert "checking the input" not in result.stderr


@pytest.mark.requirement("L-3")
def test_no_resume_refuses_what_is_there(job):
    assert job.run("--no-resume").exit_code == 0
    result = job.run("--no-resume")
    assert result.exit_code == 2
    assert "is committed already" in result.stderr
    assert "leave out --no-resume" in result.stderr
    (job.output / "datasets/d/manifest.json").unlink()
    assert "was begun already" in job.run("--no-resume").stderr


# --- when things die ------------------------------------------------------------------------------


@pytest.mark.requirement("L-3")
def test_nobody_at_the_address_is_told_at_once(job):
    started = time.monotonic()
    result = job.run(base_url="http://127.0.0.1:9", patience="300")
    assert (result.exit_code, result.summary["error"]["code"]) == (2, "server_unreachable")
    assert time.monotonic() - started < 20


@pytest.mark.requirement("L-3")
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_is_busy_or_restarting_is_waited_for(app, job, status):
    left = [status] * 3
    app.before = lambda method, _path: (
        (left.pop(), {"retry-after": "0"}, b"not now") if method == "POST" and left else None
    )
    assert job.run(patience="30", batch_size="3").exit_code == 0
    assert not left


@pytest.mark.requirement("L-3", "R-3")
def test_a_server_that_stays_away_ends_the_run_and_the_next_one_resumes(app, job):
    app.before = lambda method, _path: (
        (503, {}, b"") if method == "POST" and len(job.receipts()) > 1 else None
    )
    result = job.run(rows_per_shard="2")
    assert (result.exit_code, result.summary["error"]["code"]) == (2, "server_unreachable")
    kept = job.receipts()
    assert 0 < len(kept) < 5
    app.before = lambda _method, _path: None
    again = job.run(rows_per_shard="2")
    assert again.exit_code == 0
    assert again.summary["shards_resumed"] == len(kept)


@pytest.mark.requirement("L-3", "R-3", "D-5")
def test_after_a_kill_no_finished_shard_is_captured_twice(tmp_path):
    app = Application(engine=FakeEngine(delay_s=0.15))
    with serving(app) as address:
        job = Job(address, write_rows(tmp_path / "rows.jsonl", prompts(24)), tmp_path / "out")
        process = job.start("--quiet", rows_per_shard="2")
        wait_for(lambda: len(job.receipts()) >= 3)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        finished = len(job.receipts())
        assert finished < 12
        wait_for(lambda: not app.service._jobs)
        before = app.engine.captured.copy()
        app.engine.delay_s = 0
        result = job.run(rows_per_shard="2")
    assert (result.exit_code, result.summary["shards_resumed"]) == (0, finished)
    captured_again = app.engine.captured - before
    assert captured_again.total() <= 24 - 2 * finished + 6, "the window at most is repeated"
    kept_rows = {tuple(f"prompt {n}".encode()) for n in finished_rows(job, finished)}
    assert not kept_rows & set(captured_again)
    whole = Job(address, job.rows, tmp_path / "whole")
    with serving(app) as address:
        assert whole.run(rows_per_shard="2", base_url=address).exit_code == 0
    assert job.dataset().manifest.content_sha256 == whole.dataset().manifest.content_sha256


def finished_rows(job: Job, count: int) -> list[int]:
    """Rows of the shards whose receipts are the oldest ``count``."""
    paths = sorted(job.output.glob("datasets/d/*.receipt.json"), key=lambda p: p.stat().st_mtime_ns)
    receipts = [json.loads(path.read_bytes()) for path in paths[:count]]
    return [
        row for one in receipts for row in range(one["first_row"], one["first_row"] + one["rows"])
    ]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.requirement("L-3")
@pytest.mark.parametrize(
    ("sent", "sigint", "code"),
    [
        (signal.SIGINT, signal.default_int_handler, 130),
        (signal.SIGTERM, signal.default_int_handler, 143),
        (signal.SIGTERM, signal.SIG_IGN, 143),  # as in a shell script's background jobs
    ],
)
def test_an_interruption_keeps_what_is_written_and_says_so(tmp_path, sent, sigint, code):
    app = Application(engine=FakeEngine(delay_s=0.2))
    with serving(app) as address:
        job = Job(address, write_rows(tmp_path / "rows.jsonl", prompts(40)), tmp_path / "out")
        before = signal.signal(signal.SIGINT, sigint)  # what is ignored is inherited
        try:
            process = job.start("--quiet", rows_per_shard="2")
        finally:
            signal.signal(signal.SIGINT, before)
        wait_for(lambda: len(job.receipts()) >= 1)
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert json.loads(stdout) == {"status": "interrupted", "exit_code": code}
    assert "running again goes on from there" in stderr
    assert "Traceback" not in stderr
    assert not list(job.output.rglob(".tmp-*"))


def test_progress_goes_to_stderr_and_stdout_is_one_json_line(job):
    process = job.start()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0
    assert len(stdout.splitlines()) == 1
    assert json.loads(stdout)["status"] == "committed"
    assert "10/10" in stderr
