"""The object stores that the tests run: moto (S3), s3rver (S3 that ignores conditions), azurite.

Each context manager yields the environment with which a client reaches the server, and a bucket or
container named ``roots`` is there.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import http.client
import shutil
import sysconfig
from pathlib import Path

import pytest

from tests.servers.processes import free_port, serving

BUCKET = "roots"
_NODE_MODULES = Path(__file__).parent / "node_modules"
_ACCOUNT = "devstoreaccount1"
# The account that azurite has, on every machine.
_ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextlib.contextmanager
def moto(folder):
    """S3 with conditional writes, from PyPI."""
    port = free_port()
    command = [Path(sysconfig.get_path("scripts")) / "moto_server", "-H", "127.0.0.1"]
    with serving([*command, "-p", str(port)], folder, port):
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4"}
        _create(port, f"/{BUCKET}", headers)
        yield s3_environment(port)


@contextlib.contextmanager
def s3rver(folder):
    """S3 that takes a conditional write and ignores the condition, from npm."""
    port = free_port()
    options = {"--directory": folder, "--address": "127.0.0.1", "--port": port}
    flags = ["--silent", "--allow-mismatched-signatures", "--no-vhost-buckets"]
    command = [*_node("s3rver"), *_flat(options), *flags, "--configure-bucket", BUCKET]
    with serving(command, folder, port):
        yield s3_environment(port)


@contextlib.contextmanager
def azurite(folder):
    """Azure's blob store, from npm."""
    port = free_port()
    options = {"--blobHost": "127.0.0.1", "--blobPort": port}
    flags = ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with serving([*_node("azurite-blob"), *_flat(options), *flags], folder, port):
        path = f"/{_ACCOUNT}/{BUCKET}"
        _create(port, f"{path}?restype=container", _shared_key(path))
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }


def s3_environment(port):
    return {
        "AWS_ACCESS_KEY_ID": "S3RVER",
        "AWS_SECRET_ACCESS_KEY": "S3RVER",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
    }


def _node(program):
    """How to run a program of a Node package; where there is none, the test is skipped."""
    path = _NODE_MODULES / ".bin" / program
    if shutil.which("node") and path.exists():
        return ["node", path]
    return pytest.skip(f"{program} is not here; where npm is, `make servers` installs it")


def _flat(options):
    return [str(part) for option in options.items() for part in option]


def _create(port, path, headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("PUT", path, headers=headers | {"Content-Length": "0"})
    answer = connection.getresponse()
    assert answer.status in (200, 201), answer.read()
    connection.close()


def _shared_key(path):
    """Azure's signature of the request that creates a container."""
    date = email.utils.formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + named + f"/{_ACCOUNT}{path}\nrestype:container"
    key = base64.b64decode(_ACCOUNT_KEY)
    signature = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
    return headers | {"Authorization": f"SharedKey {_ACCOUNT}:{signature}"}
