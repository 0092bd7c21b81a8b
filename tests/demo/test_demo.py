import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from deployments.demo import __main__ as demo
from deployments.demo import analyse, model
from deployments.demo.server import base_url, render_config

ROOT = Path(__file__).parents[2]


def test_a_model_is_converted_once(tmp_path, monkeypatch):
    calls = []

    def convert(directory):
        calls.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_convert", convert)
    first = model.prepare_model(tmp_path)
    before = (first / "config.json").stat().st_mtime_ns
    assert model.prepare_model(tmp_path) == first == tmp_path / "gemma-3-270m"
    assert len(calls) == 1
    assert (first / "config.json").stat().st_mtime_ns == before


@pytest.mark.requirement("U-1")
def test_an_interrupted_conversion_leaves_no_model_and_is_begun_anew(tmp_path, monkeypatch):
    def killed(directory):
        (directory / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        model.prepare_model(tmp_path)
    assert not (tmp_path / "gemma-3-270m").exists()
    monkeypatch.setattr(model, "_convert", lambda directory: (directory / "whole").touch())
    assert [path.name for path in model.prepare_model(tmp_path).iterdir()] == ["whole"]
    assert [path.name for path in tmp_path.iterdir()] == ["gemma-3-270m"]


def test_another_model_is_served_at_the_length_that_it_has(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_positions": 128}')
    assert model.longest_row(str(tmp_path), 2048) == 128
    assert model.longest_row(str(tmp_path), 64) == 64


def test_the_config_differs_from_the_shipped_one_in_model_length_and_port_only(tmp_path):
    source = ROOT / "serve_config.yaml"
    port = render_config(
        source, tmp_path / "c.yaml", model="/m", served_model_name="m", longest_row=lambda n: n - 1
    )
    shipped, rendered = (yaml.safe_load(p.read_text()) for p in (source, tmp_path / "c.yaml"))
    assert rendered["http_options"]["port"] == port
    assert rendered["applications"][0]["args"]["model"] == "/m"
    shipped["http_options"]["port"] = port
    args = shipped["applications"][0]["args"]
    args |= {"model": "/m", "served_model_name": "m", "max_model_len": args["max_model_len"] - 1}
    assert rendered == shipped


def test_a_busy_port_is_avoided(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        source = tmp_path / "source.yaml"
        source.write_text(
            yaml.safe_dump(
                {"http_options": {"port": taken}, "applications": [{"args": {"max_model_len": 9}}]}
            )
        )
        port = render_config(
            source, tmp_path / "c.yaml", model="m", served_model_name="m", longest_row=int
        )
    assert port != taken
    assert base_url(port) == f"http://127.0.0.1:{port}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A demo folder of its own; what the demo says goes to standard output, in one line."""
    for name in ("DEMO", "ARTIFACTS", "STATEMENTS"):
        monkeypatch.setattr(demo, name, tmp_path / getattr(demo, name))
    monkeypatch.setattr(demo, "console", Console(highlight=False, width=1000))
    return demo.DEMO


@pytest.mark.requirement("U-4")
@pytest.mark.parametrize("wanted", ["/nope", "an_empty_folder"])
def test_a_model_that_is_not_there_is_refused_in_the_first_step(
    folder, wanted, tmp_path, monkeypatch, capsys
):
    (tmp_path / "an_empty_folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEMO_MODEL", wanted)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert demo.main() == 1
    said = capsys.readouterr().out
    assert "The demo stopped: DEMO_MODEL: expected a" in said
    assert wanted in said
    assert "2/4" not in said


def test_a_model_of_ones_own_gives_a_dataset_of_its_own(folder, tmp_path, monkeypatch):
    own = tmp_path / "my model"
    own.mkdir()
    (own / "config.json").write_text("{}")
    monkeypatch.chdir(own)
    monkeypatch.setenv("DEMO_MODEL", ".")
    target = demo._target()
    assert (target.model, target.served_name) == (".", "my model")
    assert target.dataset_id == "true-false-statements-my-model"
    assert target.revision.startswith("sha256:")


# Holds the demo's lock as the demo does, and says its process id once it has it.
HOLDER = """
import os, sys, time
from pathlib import Path
from deployments.demo import __main__ as demo
demo.DEMO = Path(sys.argv[1])
with demo._only_one():
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.mark.requirement("U-4")
def test_a_second_demo_is_told_which_is_the_first_and_how_to_end_it(folder, capsys):
    folder.mkdir()
    (folder / "lock").write_text("123456789\n")  # what one left that was killed
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        pid = int(holder.stdout.readline())
        assert demo.main() == 1
        holder.terminate()
    said = capsys.readouterr().out
    assert f"running in {folder.resolve()}, as process {pid};" in said
    assert said.strip().endswith(f": kill {pid}")
    with demo._only_one():
        assert int((folder / "lock").read_text()) == os.getpid()


@pytest.mark.requirement("U-1")
@pytest.mark.parametrize(
    ("numbers", "is_drawn"),
    [
        (b'{"manifest_sha256":"m"}', True),
        (b'{"manifest_sha256":"other"}', False),
        (b'{"manifest_sha256":"m', False),
        (b"{}", False),
        (b"[1]", False),
        (b"\xff", False),
        (None, False),
    ],
)
def test_what_was_drawn_is_known_by_numbers_that_can_be_read(
    folder, monkeypatch, numbers, is_drawn
):
    target = demo.Target("m", "r", "m", "d")
    target.results.mkdir(parents=True)
    (target.results / analyse.PICTURE).touch()
    if numbers is not None:
        (target.results / analyse.NUMBERS).write_bytes(numbers)
    dataset = SimpleNamespace(manifest=SimpleNamespace(manifest_sha256="m"))
    monkeypatch.setattr(demo, "load_dataset", lambda *_: dataset)
    assert demo._is_drawn(target) is is_drawn


@pytest.mark.requirement("U-1")
@pytest.mark.parametrize("killed_at", [analyse.PICTURE, analyse.NUMBERS])
def test_an_analysis_that_is_killed_is_not_taken_for_done(
    folder, monkeypatch, report_stub, killed_at
):
    """Not even over the results of another dataset, which are left whole."""
    target = demo.Target("m", "r", "m", "d")
    target.results.mkdir(parents=True)
    for name in (analyse.PICTURE, analyse.NUMBERS):
        (target.results / name).write_bytes(b'{"manifest_sha256":"old"}')
    replace = Path.replace

    def killed(path, other):
        if Path(other).name == killed_at:
            raise KeyboardInterrupt
        return replace(path, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            analyse.analyse("root", "d", target.results)
    assert (target.results / killed_at).read_bytes() == b'{"manifest_sha256":"old"}'
    assert not demo._is_drawn(target)
    analyse.analyse("root", "d", target.results)
    assert demo._is_drawn(target)


@pytest.fixture
def report_stub(monkeypatch):
    """A dataset and a report without a model, drawn as a few bytes."""
    manifest = SimpleNamespace(manifest_sha256="m")
    dataset = SimpleNamespace(manifest=manifest, site=lambda name: name)
    probe = SimpleNamespace(site="embed", predict=lambda features: [features])
    report = SimpleNamespace(
        best=SimpleNamespace(probe=probe), to_json=lambda: {"manifest_sha256": "m"}
    )
    monkeypatch.setattr(demo, "load_dataset", lambda *_: dataset)
    monkeypatch.setattr(analyse, "load_dataset", lambda *_, **__: dataset)
    monkeypatch.setattr(analyse, "probe_by_layer", lambda *_, **__: report)
    monkeypatch.setattr(analyse, "save_probe", lambda *_: None)
    monkeypatch.setattr(analyse, "load_probe", lambda *_: probe)
    monkeypatch.setattr(
        analyse, "plot_probe_report", lambda report, path, **_: path.write_bytes(b"picture")
    )


def test_the_waiting_client_joins_no_cluster_and_asks_no_dashboard(monkeypatch):
    """Neither is the demo's: its cluster has a token of its own, and no port that is known."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("WLLM_API_KEY", "of another server")
    started = []

    def popen(command, *, env, **_options):
        started.append((command, env))
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0)

    monkeypatch.setattr(subprocess, "Popen", popen)
    demo._wait_ready(SimpleNamespace(poll=lambda: None), "http://127.0.0.1:1")
    ((command, environment),) = started
    assert command[command.index("--dashboard-url") + 1] == ""
    assert environment["RAY_ADDRESS"] == "local"
    assert "WLLM_API_KEY" not in environment


# A program that starts another, which ignores SIGTERM, and says its process id.
STUBBORN = """
import subprocess, sys, time
code = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(1, flush=True); time.sleep(60)"
)
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
# A parent that starts the guard and can be killed.
PARENT = """
import subprocess, sys, time
command = [sys.executable, "-m", "deployments.demo.guard", sys.executable, "-c", sys.argv[1]]
guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.requirement("U-1")
def test_nothing_that_the_demo_started_outlives_its_kill_9():
    command = [sys.executable, "-c", PARENT, STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        stubborn = int(parent.stdout.readline())
        assert is_running(stubborn)
        os.kill(parent.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while is_running(stubborn) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(stubborn)


def test_the_guard_ends_with_its_command():
    command = [sys.executable, "-m", "deployments.demo.guard", sys.executable, "-c", "exit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as guard:
        assert guard.wait(30) == 3
