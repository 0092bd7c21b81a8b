"""Which commit a name on the hub is: the real client, and a hub on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.requirement("D-2")

NAME = "org/tiny"
COMMITS = {
    None: "a" * 40,
    "main": "a" * 40,
    "v1": "b" * 40,
    "b" * 40: "b" * 40,
    "refs/pr/1": "c" * 40,
}
CACHED = "d" * 40

# In a process of its own: the client reads its environment when it is imported.
RESOLVE = """
import json, sys
from wllm_ray.capture.model_files import resolve_model
from wllm_ray.errors import NotFoundError
found = []
for revision in json.loads(sys.argv[2]):
    try:
        found.append(resolve_model(sys.argv[1], revision).model_dump())
    except NotFoundError as error:
        found.append([error.code, error.message])
print(json.dumps(found))
"""


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does when it is asked for a model."""

    def do_GET(self) -> None:
        revision = self.path.removeprefix(f"/api/models/{NAME}").removeprefix("/revision/")
        revision = revision.replace("%2F", "/") or None
        is_known = revision in COMMITS or revision == "empty"
        body = json.dumps({"id": NAME, "sha": COMMITS.get(revision)}).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if not is_known:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Quiet."""


@contextlib.contextmanager
def serving_hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def resolved(tmp_path):
    """Resolve revisions against a hub's address; what is in the cache is of branch ``main``."""
    folder = tmp_path / "hub/models--org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(CACHED)
    (folder / "snapshots" / CACHED).mkdir(parents=True)
    (folder / "snapshots" / CACHED / "config.json").write_text("{}")

    def resolved(endpoint, *revisions, **changes):
        environment = {name: value for name, value in os.environ.items() if "HF_" not in name}
        environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, NAME, json.dumps(revisions)],
            env=environment | changes,
            check=True,
            capture_output=True,
            text=True,
        )
        return json.loads(done.stdout)

    return resolved


def test_a_branch_or_tag_is_kept_apart_from_the_commit_that_it_was(resolved):
    with serving_hub() as endpoint:
        found = resolved(endpoint, *COMMITS)
    assert found == [
        {"name": NAME, "revision": commit, "requested_revision": revision}
        for revision, commit in COMMITS.items()
    ]


def test_a_revision_without_a_commit_is_refused(resolved):
    with serving_hub() as endpoint:
        (unknown, empty) = resolved(endpoint, "nowhere", "empty")
    assert unknown[0] == empty[0] == "model_not_found"
    assert "found neither for 'org/tiny' (RevisionNotFoundError)" in unknown[1]
    assert "the hub names no commit for 'org/tiny'" in empty[1]


@pytest.mark.parametrize("offline", ["0", "1"])
def test_without_the_hub_it_is_the_commit_in_the_cache(resolved, offline):
    """Whether the client was told so, or nobody answers at the address."""
    with serving_hub() as endpoint:
        gone = endpoint
    by_default, by_branch, other = resolved(gone, None, "main", "v1", HF_HUB_OFFLINE=offline)
    assert by_default == {"name": NAME, "revision": CACHED, "requested_revision": None}
    assert by_branch == {"name": NAME, "revision": CACHED, "requested_revision": "main"}
    assert other[0] == "model_not_found"
    assert "check the path, or the network and the name" in other[1]
