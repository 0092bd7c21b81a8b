"""``wllm serve``: start the application of this checkout through Ray's own command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from wllm_ray.cli.reporting import reports_errors, say
from wllm_ray.errors import InvalidInputError, NotFoundError

__all__ = ["serve", "serve_command"]

BUILDER = "deployments.app:build_app"


@reports_errors
def serve(
    model: Annotated[str, typer.Argument(help="A local model directory, or a name on the hub.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Application arguments, as in serve_config.yaml."
        ),
    ] = None,
    *,
    served_model_name: Annotated[
        str | None, typer.Option(help="What callers write as `model`.")
    ] = None,
) -> None:
    """Serve a model from a checkout of wllm_ray, on this machine's loopback address.

    Runs `serve run deployments.app:build_app model=MODEL …`, so Ray's own options and environment
    variables apply. For clusters, use serve_config.yaml.
    """
    command = serve_command(model, served_model_name, settings or [], Path.cwd())
    say(" ".join(command))
    os.execv(command[0], command)  # noqa: S606 (no shell is involved)


def serve_command(
    model: str, served_model_name: str | None, settings: list[str], folder: Path
) -> list[str]:
    """The command that starts the application.

    Raises:
        InvalidInputError: A setting that is not KEY=VALUE.
        NotFoundError: ``folder`` is not a checkout, or Ray is not installed.
    """
    for one in settings:
        if not one.partition("=")[1]:
            raise InvalidInputError(
                f"settings are KEY=VALUE, found {one!a}", code="invalid_argument"
            )
    if not (folder / "deployments" / "app.py").is_file():
        raise NotFoundError(
            f"expected deployments/app.py in {folder}, found none; run this in a checkout of "
            f"wllm_ray (the installed package holds the library only)",
            code="object_not_found",
        )
    program = Path(sys.executable).with_name("serve")
    if not program.is_file():
        raise NotFoundError(
            f"expected Ray's `serve` command beside {sys.executable}, found none; install it with "
            f"`pip install 'wllm-ray[serve]'`",
            code="object_not_found",
        )
    named = [f"served_model_name={served_model_name}"] if served_model_name else []
    return [str(program), "run", BUILDER, f"model={model}", *named, *settings]
