"""The application's arguments: typed, and strict about names."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from deployments.args import AppArgs
from deployments.check import main as check
from deployments.check import problems_of
from wllm_ray.capture.admission import MIN_PASS_TOKENS
from wllm_ray.errors import InvalidInputError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.requirement("R-1")
def test_a_misspelt_key_is_an_error_that_names_it():
    meant = "unknown field 'storage_rot'; did you mean 'storage_root'\\? The fields are model, "
    with pytest.raises(ValidationError, match=meant):
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


@pytest.mark.requirement("R-1")
def test_how_a_replica_computes_is_chosen_by_its_arguments():
    args = AppArgs(model="m")
    assert (args.precision, args.prefix_caching, args.depth_bounded) == ("native", False, True)
    told = {"precision": "matched", "prefix_caching": "true", "depth_bounded": "false"}
    args = AppArgs.model_validate({"model": "m", **told})
    assert (args.precision, args.prefix_caching, args.depth_bounded) == ("matched", True, False)


@pytest.mark.requirement("C-17")
def test_what_is_not_offered_is_told_with_what_to_do_instead():
    (said,) = problems_of({"model": "m", "tensor_parallel_size": 2})
    assert "'tensor_parallel_size' is not offered: capture runs on one GPU per replica" in said


@pytest.mark.parametrize(
    "bad", [{"threads": "two"}, {"num_gpus": 2}, {"dtype": "int8"}, {"precision": "exact"}]
)
def test_a_wrong_value_is_an_error_that_names_its_key(bad):
    with pytest.raises(ValidationError, match=next(iter(bad))):
        AppArgs.model_validate({"model": "m", **bad})


def test_the_split_size_has_the_engines_own_bound():
    least = MIN_PASS_TOKENS
    assert AppArgs(model="m", prefill_split_tokens=least).prefill_split_tokens == least
    with pytest.raises(ValidationError, match="prefill_split_tokens"):
        AppArgs(model="m", prefill_split_tokens=least - 1)


@pytest.mark.requirement("R-1")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"model": "m"}, []),
        ({}, ["model: is missing"]),
        ({"model": "m", "modell": "x"}, ["unknown field 'modell'; did you mean 'model'? The fi"]),
        (
            {"model": "m", "threads": "two", "num_gpus": 2},
            [
                "threads: expected a whole number of at least 1, found 'two'",
                "num_gpus: expected one of 'auto', 0, 1, found 2",
            ],
        ),
        (
            {"model": "m", "gpu_memory_utilization": 2},
            ["gpu_memory_utilization: expected a number above 0 and of at most 1, found 2"],
        ),
    ],
)
def test_arguments_are_judged_in_one_line_each(args, said):
    found = problems_of(args)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_arguments_are_judged_without_ray():
    code = (
        "import sys, deployments.check; heavy = {'ray', 'vllm', 'torch'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("text", [None, "applications: 3", "a: [", "[]"])
def test_a_file_that_is_no_config_is_told(text, tmp_path, capsys):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    assert check([str(path)]) == 2
    assert "is not a Serve config file" in capsys.readouterr().out


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


@pytest.mark.requirement("D-1")
@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("s3://user:hunter2@bucket/x", "storage root"),
        ("s3://bucket/x?token=hunter2", "storage root"),
        ("ftp://bucket", "scheme"),
        ("memory://x", "one process"),
    ],
)
def test_a_storage_root_that_cannot_be_is_told_without_its_secret(root, said):
    with pytest.raises(ValidationError) as error:
        AppArgs(model="weights", storage_root=root)
    (problem,) = problems_of({"model": "weights", "storage_root": root})
    assert said in problem
    assert "hunter2" not in problem + str(error.value)
