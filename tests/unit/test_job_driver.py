"""What the driver of a Ray job says before it begins."""

import warnings

import pytest
import typer
from typer.testing import CliRunner

from wllm_ray.errors import NotFoundError, UnavailableError

with warnings.catch_warnings():  # Ray's own use of pydantic is not ours to mend
    warnings.simplefilter("ignore")
    from ray.serve.schema import (
        ApplicationStatus,
        ApplicationStatusOverview,
        DeploymentStatus,
        DeploymentStatusOverview,
        DeploymentStatusTrigger,
        ServeStatus,
    )

    from deployments.job import job
    from deployments.joining import wait_running, waits_for


def command_line(*arguments: str, **environment: str):
    app = typer.Typer()
    app.command()(job)
    return CliRunner().invoke(app, arguments, env=environment)


def deployment(status=DeploymentStatus.UPDATING, message="", **replicas: int):
    trigger = DeploymentStatusTrigger.CONFIG_UPDATE_STARTED
    return DeploymentStatusOverview(status, trigger, replicas, message)


def serve_status(status=None, message="", **deployments) -> ServeStatus:
    """One application, `wllm`, or none where ``status`` is None."""
    applications = {"other": ApplicationStatusOverview(ApplicationStatus.RUNNING, "", 0.0, {})}
    if status is not None:
        overview = ApplicationStatusOverview(status, message, 0.0, deployments)
        applications["wllm"] = overview
    return ServeStatus(proxies={"node": "HEALTHY"}, applications=applications)


@pytest.mark.requirement("L-5", "U-4")
def test_a_cluster_without_serve_or_without_the_application_is_told_apart():
    with pytest.raises(NotFoundError, match="Ray Serve does not run on this cluster; start it"):
        waits_for(ServeStatus(), "wllm")
    with pytest.raises(NotFoundError, match=r"no application 'wllm' \(applications: other\)") as e:
        waits_for(serve_status(), "wllm")
    assert e.value.code == "application_not_found"
    assert "--app" in e.value.message


@pytest.mark.requirement("L-5")
def test_a_failed_application_is_quoted_once():
    broken = deployment(DeploymentStatus.UNHEALTHY, "the constructor raised", STARTING=1)
    found = serve_status(
        ApplicationStatus.DEPLOY_FAILED, "the constructor raised", Ingress=deployment(), Act=broken
    )
    with pytest.raises(UnavailableError, match="the constructor raised") as caught:
        waits_for(found, "wllm")
    assert caught.value.code == "deploy_failed"
    assert caught.value.message.count("the constructor raised") == 1
    assert "is DEPLOY_FAILED; Ray says:" in caught.value.message


@pytest.mark.requirement("L-5", "R-3")
def test_an_application_whose_replicas_are_being_replaced_is_waited_for():
    """Ray calls it unhealthy when they were killed again while they started, and goes on."""
    replacing = serve_status(
        ApplicationStatus.UNHEALTHY, "died", Act=deployment(DeploymentStatus.UNHEALTHY, "died")
    )
    answers = iter([replacing, serve_status(ApplicationStatus.RUNNING)])
    wait_running("wllm", 30, status=lambda: next(answers), resources=dict)


@pytest.mark.requirement("L-5")
def test_a_starting_application_is_waited_for_and_then_said_what_it_waits_for():
    words = "Resources required for each replica: {'GPU': 1}, total resources available: {}"
    starting = serve_status(
        ApplicationStatus.DEPLOYING, ActivationReplica=deployment(message=words, STARTING=2)
    )
    with pytest.raises(UnavailableError, match="Resources required") as caught:
        wait_running("wllm", 0, status=lambda: starting, resources=lambda: {"CPU": 3.0, "x": 1})
    assert caught.value.code == "not_ready"
    said = caught.value.message
    assert "it is DEPLOYING (ActivationReplica UPDATING, replicas 2 STARTING, Ray says" in said
    assert "The cluster has 3 CPU to spare" in said
    answers = iter([starting, serve_status(ApplicationStatus.RUNNING)])
    wait_running("wllm", 30, status=lambda: next(answers), resources=dict)


@pytest.mark.requirement("L-5")
def test_a_storage_root_inside_the_copy_of_the_working_directory_is_refused(tmp_path):
    result = command_line(str(tmp_path / "rows"), "--storage", "data")
    assert result.exit_code == 2
    assert "--storage takes an absolute path or a URI, found 'data'" in result.output


@pytest.mark.requirement("L-5")
def test_an_input_that_the_driver_does_not_see_is_named(tmp_path):
    result = command_line(str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 2
    assert "rows.jsonl on the machine where this runs" in result.output


def test_help_names_positions_and_layouts():
    text = " ".join(command_line("--help", COLUMNS="200").output.split())
    assert all(words in text for words in ("all_prompt", "index:0,-1", "stacked", "per_site"))


def test_help_names_every_exit_code():
    text = " ".join(command_line("--help").output.split())
    assert all(words in text for words in ("0 done", "1 rows failed", "2 input", "143 stopped"))
