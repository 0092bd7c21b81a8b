"""What a storage root may be called, where its credentials come from, and what it says if not."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from dataset_builders import make_rows, write_dataset
from typer.testing import CliRunner

from tests.servers import stores
from wllm_ray.cli import app as wllm
from wllm_ray.cli.located import located
from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores import remote, remote_client
from wllm_ray.dataset.stores.probing import expect_create_only
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.errors import InvalidInputError, StorageError, WLLMError

pytestmark = pytest.mark.requirement("D-1")

SECRET = "x9SECRETx9"


def shown(error):
    """Everything that a log would show of it."""
    return "".join(traceback.format_exception(error))


def test_the_same_memory_uri_is_the_same_store():
    open_store("memory://shared-name").put("a", b"x")
    assert open_store("memory://shared-name").get("a") == b"x"
    assert open_store("memory://other-name").size("a") is None


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_opening_touches_nothing(tmp_path, scheme):
    store = open_store(f"{scheme}{tmp_path}/not-yet")
    assert store.list("datasets") == []
    assert not (tmp_path / "not-yet").exists()


@pytest.mark.parametrize("root", ["ftp://x", f"https://user:{SECRET}@bucket/x"])
def test_an_unknown_scheme_is_refused(root):
    with pytest.raises(InvalidInputError, match=r"found scheme '(ftp|https)'") as error:
        open_store(root)
    assert SECRET not in shown(error.value)


@pytest.mark.parametrize(
    "root",
    [
        f"s3://key:{SECRET}@bucket/x",
        f"s3://{SECRET}@bucket",
        f"s3://bucket/x?X-Amz-Signature={SECRET}",
        f"s3://bucket?{SECRET}",
        f"s3://bucket/x#{SECRET}",
        f"s3://key:{SECRET}/rest@bucket/x",
        f"az://container/x?sv=2026&sig={SECRET}",
        f"gs://user:{SECRET}@bucket",
        f"memory://user:{SECRET}@name",
        f"file://user:{SECRET}@host/x",
    ],
)
def test_a_root_that_holds_a_secret_is_refused_without_repeating_it(root):
    with pytest.raises(InvalidInputError, match="Credentials and addresses come from") as error:
        open_store(root)
    assert error.value.code == "invalid_argument"
    assert SECRET not in shown(error.value)


@pytest.mark.parametrize(
    "root",
    [
        f"s3://KEY:{SECRET}@b/x",
        f"s3://KEY:{SECRET}@b/datasets/d",
        f"s3://b/datasets/d?sig={SECRET}",
        f"s3:/KEY:{SECRET}@b/x",
        f"KEY:{SECRET}@s3://b/x",
    ],
)
@pytest.mark.parametrize("read", [load_dataset, lambda root: located(root, None)])
def test_a_secret_in_an_address_alone_is_not_repeated(root, read):
    with pytest.raises(InvalidInputError, match="a storage root is") as error:
        read(root)
    assert SECRET not in shown(error.value)


@pytest.mark.parametrize("root", ["s3:/b/x", Path("s3://b/x"), Path("az://b"), "file:/b/x"])
def test_an_address_with_one_slash_is_no_local_folder(root):
    scheme = str(root).partition(":")[0]
    with pytest.raises(InvalidInputError, match=f"found one slash: write {scheme}://…"):
        open_store(root)


@pytest.mark.parametrize("root", ["", "a\0b", "file:///a%00b", "memory://a\0", None, 5, b"x"])
def test_what_is_no_root_at_all_is_refused(root):
    with pytest.raises(InvalidInputError, match="a storage root is a local path") as error:
        open_store(root)
    assert error.value.code == "invalid_argument"


@pytest.mark.parametrize("root", ["s3://bucket/..", "s3://bucket/a/%2e%2e/b", "file:///a/../b"])
def test_a_root_that_leaves_itself_is_refused(root):
    with pytest.raises(InvalidInputError, match=r"without '\.' and '\.\.'"):
        open_store(root)


@pytest.mark.parametrize("root", ["s3://", "s3:///x", "gs://", "az://"])
def test_a_root_without_a_place_is_refused(root):
    with pytest.raises(InvalidInputError, match="cannot open the storage root"):
        open_store(root)


def test_a_file_uri_is_decoded(tmp_path):
    open_store(f"file://{tmp_path}/a%20b%23c%C3%A9").put("k", b"x")
    assert (tmp_path / "a b#cé" / "k").read_bytes() == b"x"
    open_store(f"file://localhost{tmp_path}/d").put("k", b"x")
    assert (tmp_path / "d" / "k").exists()


@pytest.mark.parametrize("root", ["file://relative/path", "file://", "file://host/path"])
def test_a_file_uri_of_another_host_is_refused(root):
    with pytest.raises(InvalidInputError, match="with three slashes"):
        open_store(root)


def test_a_path_with_marks_of_a_uri_is_a_path(tmp_path):
    open_store(tmp_path / "a?b#c@d:e").put("k", b"x")
    assert Path(tmp_path, "a?b#c@d:e", "k").exists()


def test_google_cloud_opens():
    """No more is claimed: there is no server of it to test against."""
    assert open_store("gs://bucket/x").uri == "gs://bucket/x"


def test_azure_without_an_account_says_what_to_set(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInputError, match=r"set .*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container")


def test_credentials_come_from_the_environment_and_are_shown_nowhere(s3_root, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    store = open_store(s3_root)
    store.put("a", b"x")
    assert SECRET not in f"{store.uri} {store!r} {vars(store)}"


@pytest.fixture
def secrets(s3_root, monkeypatch):
    """A root on a server that takes any credentials, and some that can be told from all else."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, f"{SECRET}{name}")
    return s3_root


@pytest.mark.requirement("D-1", "D-2", "U-4")
def test_credentials_are_in_no_object_no_log_record_and_no_error(secrets, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    store = open_store(secrets)
    rows = make_rows(6, failed=[1])
    traced = TraceSpec(sites=("L1_resid_post",), site_widths=(4,))
    manifest = write_dataset(store, rows, trace=traced)
    assert verify_dataset(store, "d").ok
    assert merge_datasets(store, ["d"], "e").dataset_id == "e"
    assert len(load_dataset(secrets, "d").select([rows[0].id]).features) == 1
    texts = [store.get(key) for key, _ in store.list("datasets")]
    assert len(texts) == 2 * (2 + 2 * 4)
    key = f"datasets/d/{manifest.shards[0].rows_file.name}"
    store.put(key, b"x", mode="overwrite")
    (fault,) = verify_dataset(store, "d").faults
    nowhere = open_store("s3://nowhere/x")
    attempts = (
        lambda: load_dataset(secrets, "d", verify="full"),
        lambda: load_dataset(secrets, "no-such-dataset"),
        lambda: load_dataset(nowhere, "d"),
        lambda: write_dataset(nowhere, rows),
        lambda: write_dataset(store, make_rows(5)),
        lambda: store.put("datasets/d/spec.json", b"x"),
        lambda: store.get("datasets/d/none"),
        lambda: store.get_range(key, 0, 9),
        lambda: expect_create_only(nowhere),
    )
    for attempt in attempts:
        with pytest.raises(WLLMError) as error:
            attempt()
        texts.append(f"{shown(error.value)} {error.value.details}".encode())
    texts += [record.getMessage().encode() for record in caplog.records]
    texts += [stream.encode() for stream in capfd.readouterr()]
    texts += [f"{fault} {store.probe()} {store!r} {nowhere!r}".encode()]
    assert not any(SECRET.encode() in text for text in texts)


COMMANDS = {
    # Of `wllm`, with ROOT for the storage root, and how each ends.
    ("verify", "ROOT", "d"): 0,
    ("verify", "ROOT", "d", "--json"): 0,
    ("inspect", "ROOT", "d", "--json"): 0,
    ("gc", "ROOT"): 0,
    ("merge", "ROOT", "d", "--into", "e"): 0,
    ("verify", "ROOT", "no-such-dataset"): 2,
    ("inspect", "s3://nowhere/x", "d"): 2,
}


@pytest.mark.requirement("D-1", "U-4")
def test_no_command_shows_credentials(secrets, caplog):
    caplog.set_level(logging.DEBUG)
    write_dataset(open_store(secrets), make_rows(4))
    for arguments, code in COMMANDS.items():
        named = [secrets if one == "ROOT" else one for one in arguments]
        result = CliRunner().invoke(wllm, named)
        assert result.exit_code == code, result.output
        assert SECRET not in result.output
    assert not any(SECRET in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_address_has_the_names_that_it_has_elsewhere(s3_root, moto, monkeypatch, name):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, moto["AWS_ENDPOINT_URL"])
    assert open_store(s3_root).put("a", b"x")


@pytest.mark.parametrize("value", [None, "false"])
def test_plain_http_is_refused_unless_it_is_allowed(s3_root, monkeypatch, value):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    if value is not None:
        monkeypatch.setenv("AWS_ALLOW_HTTP", value)
    with pytest.raises(StorageError, match=r"the address is plain http.*AWS_ALLOW_HTTP=true"):
        open_store(s3_root).get("a")


def test_a_setting_that_cannot_be_read_is_refused(s3_root, monkeypatch):
    monkeypatch.setenv("AWS_ALLOW_HTTP", "perhaps")
    with pytest.raises(InvalidInputError, match="cannot open the storage root"):
        open_store(s3_root)


@pytest.mark.parametrize("value", ["minio:9000", "", "http://h:99999", "http://h:9\n", "http://[h"])
@pytest.mark.parametrize(
    ("root", "name"),
    [("s3://b/x", "AWS_ENDPOINT_URL"), ("az://b/x", "AZURE_STORAGE_ENDPOINT")],
)
def test_an_address_that_is_none_is_refused_before_the_client_breaks_down(
    monkeypatch, root, name, value
):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match=f"expected http://.*variable {name}, ") as error:
        open_store(root)
    assert not value or value not in shown(error.value)


@pytest.mark.parametrize(
    "name", ["AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
)
def test_a_setting_with_a_line_break_at_its_end_is_refused(s3_root, monkeypatch, name):
    monkeypatch.setenv(name, f"{SECRET}\n")
    with pytest.raises(InvalidInputError, match=f"the environment variable {name} begins") as error:
        open_store(s3_root)
    assert SECRET not in shown(error.value)


def test_an_address_without_a_path_or_port_is_one(monkeypatch):
    for value in ("https://minio", "http://[::1]:9000", "HTTP://h_x:9/path"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", value)
        assert open_store("s3://b/x").uri == "s3://b/x"


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_a_client_that_breaks_down_is_a_storage_error(s3_root, monkeypatch, mode):
    """What the checks of the environment let through: here a setting is changed behind them."""
    monkeypatch.setattr(remote_client, "check_environment", lambda _: None)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"{SECRET}\n")
    store = open_store(s3_root)
    calls = (
        lambda: store.put("a", b"x", mode=mode),
        lambda: store.get("a"),
        lambda: store.size("a"),
        lambda: store.list("a"),
    )
    for call in calls:
        with pytest.raises(StorageError, match=r"holds a line break.*PanicException") as error:
            call()
        assert SECRET not in shown(error.value)


def test_an_interrupt_passes_through(s3_root, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    store = open_store(s3_root)
    monkeypatch.setattr(remote.obstore, "head", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.size("a")


def test_a_bucket_that_is_not_there(s3_root):
    store = open_store("s3://nowhere/x")
    calls = (
        lambda: store.put("a", b"x"),
        lambda: store.put("a", b"x", mode="overwrite"),
        lambda: store.put_content("a-", "", b"x"),
        lambda: store.get("a"),
        lambda: store.list("a"),
    )
    for call in calls:
        with pytest.raises(StorageError, match="there is no such bucket or container") as error:
            call()
        assert error.value.code == "storage_failed"


def test_wrong_credentials_on_a_server_that_checks_them(azurite, monkeypatch):
    for name, value in azurite.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    store = open_store(f"az://{stores.BUCKET}/wrong")
    for call in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: store.list("a")):
        with pytest.raises(StorageError, match="the credentials") as error:
            call()
        assert "c2VjcmV0" not in shown(error.value)


FORKS = """
import os, sys
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import StorageError
store = open_store(sys.argv[1])
if sys.argv[2] == "used":
    store.put("a", b"x")
child = os.fork()
if not child:
    try:
        open_store(sys.argv[1]).put("a", b"x")
    except StorageError as error:
        print(error.message, flush=True)
    os._exit(0)
os.waitpid(child, 0)
store.put("b", b"x")
print(store.get("b").decode())
"""


@pytest.mark.parametrize("history", ["used", "unused"])
def test_a_fork_of_a_process_that_used_a_store_is_told_instead_of_hanging(s3_root, history):
    """The client's threads do not live on in a fork, and what waits for them waits for ever."""
    program = [sys.executable, "-W", "ignore", "-c", FORKS, s3_root, history]
    printed = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout
    assert ("Start processes by spawn, not fork" in printed) == (history == "used")
    assert printed.endswith("x\n")


def test_a_root_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = open_store(tmp_path / "file")
    with pytest.raises(StorageError, match=r"could not write a under .*: Not a directory"):
        store.put("a", b"x")
    assert store.probe().writable is False
