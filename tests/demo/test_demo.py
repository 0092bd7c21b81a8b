import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from deployments.demo import model
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


def test_the_config_differs_from_the_shipped_one_in_model_and_port_only(tmp_path):
    source = ROOT / "serve_config.yaml"
    port = render_config(source, tmp_path / "c.yaml", model="/m", served_model_name="m")
    shipped, rendered = (yaml.safe_load(p.read_text()) for p in (source, tmp_path / "c.yaml"))
    assert rendered["http_options"]["port"] == port
    assert rendered["applications"][0]["args"]["model"] == "/m"
    shipped["http_options"]["port"] = port
    shipped["applications"][0]["args"] |= {"model": "/m", "served_model_name": "m"}
    assert rendered == shipped


def test_a_busy_port_is_avoided(tmp_path):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        taken = busy.getsockname()[1]
        source = tmp_path / "source.yaml"
        source.write_text(
            yaml.safe_dump({"http_options": {"port": taken}, "applications": [{"args": {}}]})
        )
        port = render_config(source, tmp_path / "c.yaml", model="m", served_model_name="m")
    assert port != taken
    assert base_url(port) == f"http://127.0.0.1:{port}"


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
