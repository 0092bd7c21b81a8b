"""The application's arguments: typed, and strict about names."""

import pytest
from pydantic import ValidationError

from deployments.args import AppArgs
from wllm_ray.errors import InvalidInputError


@pytest.mark.requirement("R-1")
def test_a_misspelt_key_is_an_error_that_names_it():
    with pytest.raises(ValidationError, match="storage_rot"):
        AppArgs.model_validate({"model": "m", "storage_rot": "/x"})


@pytest.mark.requirement("R-1")
def test_text_from_the_command_line_becomes_the_fields_type():
    args = AppArgs.model_validate(
        {
            "model": "m",
            "threads": "2",
            "num_gpus": "1",
            "trust_remote_code": "true",
            "gpu_memory_utilization": "0.5",
            "max_model_len": "512",
        }
    )
    assert (args.threads, args.num_gpus, args.trust_remote_code) == (2, 1, True)
    assert (args.gpu_memory_utilization, args.max_model_len) == (0.5, 512)
    assert AppArgs.model_validate({"model": "m", "num_gpus": "auto"}).num_gpus == "auto"


@pytest.mark.parametrize("bad", [{"threads": "two"}, {"num_gpus": 2}, {"dtype": "int8"}])
def test_a_wrong_value_is_an_error_that_names_its_key(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        AppArgs.model_validate({"model": "m", **bad})


def test_relative_paths_are_resolved_where_they_were_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    args = AppArgs(model="weights", storage_root="data")
    assert args.model == str(tmp_path / "weights")
    assert args.storage_root == str(tmp_path / "data")


def test_hub_names_and_uris_are_left_alone():
    args = AppArgs(model="Qwen/Qwen3-0.6B", storage_root="s3://bucket/wllm")
    assert (args.model, args.storage_root) == ("Qwen/Qwen3-0.6B", "s3://bucket/wllm")


@pytest.mark.requirement("H-7")
def test_the_api_key_comes_from_the_environment_and_an_empty_one_is_refused(monkeypatch):
    args = AppArgs(model="m", api_key_env="WLLM_TEST_KEY")
    assert args.api_key() is None
    monkeypatch.setenv("WLLM_TEST_KEY", "secret")
    assert args.api_key() == "secret"
    monkeypatch.setenv("WLLM_TEST_KEY", " ")
    with pytest.raises(InvalidInputError, match="WLLM_TEST_KEY is set but empty"):
        args.api_key()
