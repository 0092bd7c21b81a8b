"""``make demo``: from nothing to a picture of probe accuracy by layer, on a CPU.

Everything that it makes lies in ``.demo``. Every step leaves alone what is already done, so after
an interruption, even ``kill -9``, the same command finishes the work. ``DEMO_MODEL`` names another
model: a local directory, or a name on the hub.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape

from deployments.demo.analyse import NUMBERS, PICTURE
from deployments.demo.model import MODEL_NAME, longest_row, prepare_model
from deployments.demo.server import base_url, render_config, run_client, running_server
from deployments.demo.statements import write_statements
from wllm_ray.capture.model_files import resolve_model
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.digest import request_digest
from wllm_ray.errors import NotFoundError, WLLMError
from wllm_ray.records import CaptureIdentity

__all__ = ["main"]

DEMO = Path(".demo")
STATEMENTS = DEMO / "statements.jsonl"
ARTIFACTS = DEMO / "artifacts"
CONFIG = DEMO / "serve_config.yaml"
LOG = DEMO / "serve.log"
DATASET_ID = "true-false-statements"
# Half a minute on a quiet machine, many minutes on a busy one; what fails is seen before.
READY_SECONDS = 1800
LOG_LINES = 40
# Serve's own words for an application that cannot be built, or whose replicas cannot start.
FAILED = ("DEPLOY_FAILED", "Failed to update the deployments")
WLLM = (sys.executable, "-c", "import sys; from wllm_ray.cli import main; sys.exit(main())")

console = Console(highlight=False)


class DemoError(Exception):
    """A step failed; the message says what to look at."""


@dataclass(frozen=True, slots=True)
class Target:
    """Which model, resolved, and which dataset it gives."""

    model: str
    revision: str
    served_name: str
    dataset_id: str

    @property
    def results(self) -> Path:
        """The folder for what the probe finds."""
        return DEMO / "results" / self.dataset_id


def main() -> int:
    """Run the demo; the exit status is 0, or 1 where a step failed."""
    DEMO.mkdir(exist_ok=True)
    try:
        with _only_one():
            _run()
    except (DemoError, WLLMError) as error:
        console.print(f"[red]The demo stopped:[/red] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on from here.")
        return 1
    return 0


def _run() -> None:
    with _step("1/4", "the model"):
        target = _target()
    with _step("2/4", "the statements"):
        rows = write_statements(STATEMENTS)
        console.print(f"    {rows} labelled statements in {STATEMENTS}")
    with _step("3/4", "the activations"):
        if _is_captured(target):
            console.print("    captured before, for exactly these rows and this model: kept")
        else:
            _capture(target)
    with _step("4/4", "the probe"):
        if _is_drawn(target):
            console.print("    drawn before: kept")
        else:
            _analyse(target)
    _say_goodbye(target)


@contextmanager
def _only_one() -> Iterator[None]:
    """Two demos in one folder would tread on each other's files."""
    with (DEMO / "lock").open("a+") as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read().strip()
            raise DemoError(
                f"another demo is running in {DEMO.resolve()}, as process {pid}; wait for it, or "
                f"end it and all that it started with: kill {pid}"
            ) from None
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _step(number: str, name: str) -> Iterator[None]:
    console.print(f"[bold]{number}  {name}[/bold]")
    begin = time.monotonic()
    yield
    console.print(f"    [dim]{time.monotonic() - begin:.0f} s[/dim]")


def _target() -> Target:
    wanted = os.environ.get("DEMO_MODEL")
    if wanted:
        console.print(f"    {wanted} (DEMO_MODEL)")
        try:
            found = resolve_model(wanted)
        except NotFoundError as error:
            raise DemoError(f"DEMO_MODEL: {error.message}") from None
        name = Path(found.name).name
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
        return Target(wanted, found.revision, name, f"{DATASET_ID}-{slug}")
    models = DEMO / "models"
    if not (models / MODEL_NAME).is_dir():
        console.print("    converting Gemma 3 270M once, about a minute (Gemma Terms of Use apply)")
    path = prepare_model(models)
    console.print(f"    {path}")
    return Target(str(path), resolve_model(str(path)).revision, MODEL_NAME, DATASET_ID)


def _is_captured(target: Target) -> bool:
    """Whether the dataset is committed, for this model and for what the statements are now."""
    try:
        dataset = load_dataset(str(ARTIFACTS), target.dataset_id)
    except NotFoundError:
        return False
    manifest = dataset.manifest
    identity = CaptureIdentity(
        model_revision=target.revision,
        tokenizer_revision=manifest.tokenizer.revision,
        chat_template_sha256=manifest.tokenizer.chat_template_sha256,
        sites=manifest.sites,
        position=manifest.position,
        capture_mode=manifest.capture_mode,
    ).model_dump()
    rows = [json.loads(line) for line in STATEMENTS.read_bytes().splitlines()]
    wanted = [
        request_digest(
            row_id=row["id"],
            content={"prompt": row["prompt"]},
            metadata=row["metadata"],
            identity=identity,
        )
        for row in rows
    ]
    return wanted == dataset.request_digests


def _capture(target: Target) -> None:
    """Start the application, capture every layer over HTTP, and end the application."""
    port = render_config(
        Path("serve_config.yaml"),
        CONFIG,
        model=target.model,
        served_model_name=target.served_name,
        longest_row=lambda wanted: longest_row(target.model, wanted),
    )
    url = base_url(port)
    console.print(f"    starting the application at {url} (log: {LOG})")
    with running_server(CONFIG, LOG) as server:
        _wait_ready(server, url)
        layers = [word for layer in range(_layers(url)) for word in ("--layer", str(layer))]
        options = ("--base-url", url, "--model", target.served_name, *layers)
        where = ("--dataset-id", target.dataset_id, "--output", str(ARTIFACTS))
        if _wllm("activations", str(STATEMENTS), *options, *where):
            raise DemoError(
                f"the capture failed, see above and {LOG}. If the model or the statements changed, "
                f"remove {ARTIFACTS} and run again"
            )
        console.print("    stopping the application")


def _wait_ready(server: subprocess.Popen[bytes], url: str) -> None:
    """Wait as a person would, but give up early: ``serve run`` itself outlives a failure.

    Of a failure the log tells. Ray's dashboard is not asked: only the server knows its token, and
    what listens at the usual port may be that of another cluster.
    """
    where = ("--base-url", url, "--dashboard-url", "")
    waiting = run_client([*WLLM, "wait-ready", *where, "--timeout", str(READY_SECONDS)])
    while waiting.poll() is None and server.poll() is None and not _has_failed():
        time.sleep(0.5)
    if waiting.poll() is None:
        waiting.terminate()
    if waiting.wait():
        tail = "\n".join(_log().splitlines()[-LOG_LINES:])
        raise DemoError(f"the application did not become ready; {LOG} ends so:\n{tail}")


def _has_failed() -> bool:
    log = _log()
    return any(words in log for words in FAILED)


def _wllm(*arguments: str) -> int:
    """Run the command line tool as a person would; its progress bar goes to the terminal."""
    return run_client([*WLLM, *arguments]).wait()


def _layers(url: str) -> int:
    answer = httpx.get(f"{url}/v1/models", timeout=30).raise_for_status().json()
    return int(answer["data"][0]["num_layers"])


def _log() -> str:
    return LOG.read_text(errors="replace")


def _is_drawn(target: Target) -> bool:
    """Whether the picture is there, and of this very dataset; what cannot be read is not."""
    if not (target.results / PICTURE).is_file():
        return False
    manifest = load_dataset(str(ARTIFACTS), target.dataset_id).manifest
    try:
        drawn = json.loads((target.results / NUMBERS).read_bytes())["manifest_sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return bool(drawn == manifest.manifest_sha256)


def _analyse(target: Target) -> None:
    module = "deployments.demo.analyse"
    command = [sys.executable, "-m", module, str(ARTIFACTS), target.dataset_id, str(target.results)]
    if run_client(command).wait():
        raise DemoError("the probe failed, see above")


def _say_goodbye(target: Target) -> None:
    programs = Path(sys.executable).parent
    if programs.is_relative_to(Path.cwd()):
        programs = programs.relative_to(Path.cwd())
    text = f"""
[bold]Done.[/bold]
  picture   {target.results / PICTURE}
  numbers   {target.results / NUMBERS}
  probe     {target.results / "probe"}
  dataset   {ARTIFACTS / "datasets" / target.dataset_id}

[bold]Next[/bold]
  {programs}/wllm verify {ARTIFACTS} {target.dataset_id}
  {programs}/wllm inspect {ARTIFACTS} {target.dataset_id}
  {programs}/serve run serve_config.yaml
"""
    console.print(text, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
