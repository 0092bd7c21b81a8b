"""``wllm serve``: start the application of this checkout through Ray's own command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from wllm_ray.cli.reporting import reports_errors, say
from wllm_ray.errors import InvalidInputError, NotFoundError

__all__ = ["serve", "serve_command"]

BUILDER = "deployments.app:build_app"
APPLICATION = "wllm"

Address = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to join. Default: RAY_ADDRESS, else `local`: a cluster of its own, "
        "whatever else runs on this machine."
    ),
]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="HTTP port on 127.0.0.1 (default: 8000).")
]


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
    address: Address = None,
    port: Port = None,
) -> None:
    """Serve a model from a checkout of wllm_ray, on this machine's loopback address.

    Checks the settings, then runs Ray's `serve run`, so its environment variables apply. For
    clusters, use serve_config.yaml.
    """
    folder = Path.cwd()
    args = application_args(model, served_model_name, settings or [])
    program = serve_program(folder)
    check_args(args, folder)
    if address is None and not os.environ.get("RAY_ADDRESS"):
        address = "local"
    command = serve_command(program, args, address, port)
    say(" ".join(command))
    os.execv(command[0], command)  # noqa: S606 (no shell is involved)


def application_args(
    model: str, served_model_name: str | None, settings: list[str]
) -> dict[str, str]:
    """The application's arguments, all of them text.

    Raises:
        InvalidInputError: A setting that is not KEY=VALUE, or is given twice.
    """
    args = {"model": model}
    if served_model_name:
        args["served_model_name"] = served_model_name
    for one in settings:
        name, _, value = one.partition("=")
        if not name or not value:
            raise InvalidInputError(
                f"settings are KEY=VALUE, found {one!a}", code="invalid_argument"
            )
        if name in args:
            raise InvalidInputError(
                f"setting {name!a} is given twice; give it once", code="invalid_argument"
            )
        args[name] = value
    return args


def serve_program(folder: Path) -> Path:
    """Ray's `serve` command, where there is an application to serve.

    Raises:
        NotFoundError: ``folder`` is not a checkout, or Ray is not installed.
    """
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
            f"`pip install '.[serve]'` in the checkout",
            code="object_not_found",
        )
    return program


def check_args(args: dict[str, str], folder: Path) -> None:
    """Have the checkout judge the arguments, in a process of its own: Ray takes long to start.

    Raises:
        InvalidInputError: An argument that the application does not know, or cannot use.
    """
    settings = [f"{name}={value}" for name, value in args.items()]
    command = [sys.executable, "-m", "deployments.check", *settings]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 (our own module)
    if done.returncode:
        # Without a word on stdout, the check itself has failed, and stderr says how.
        problems = done.stdout.strip() or done.stderr.strip()
        raise InvalidInputError(
            f"the application does not take these arguments: {problems}", code="invalid_argument"
        )


def serve_command(
    program: Path, args: dict[str, str], address: str | None, port: int | None
) -> list[str]:
    """The command that starts the application.

    `serve run` takes a port from a config file only, so that one is written where a port is asked
    for.
    """
    joined = ["--address", address] if address else []
    if port is not None:
        return [str(program), "run", *joined, str(_config_file(args, port))]
    settings = [f"{name}={value}" for name, value in args.items()]
    return [str(program), "run", *joined, "--name", APPLICATION, BUILDER, *settings]


def _config_file(args: dict[str, str], port: int) -> Path:
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": BUILDER,
        "args": args,
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }
    # It stays: the command takes this process's place, and reads the file later.
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="wllm-serve-", suffix=".yaml", delete=False
    ) as file:
        json.dump(config, file)  # JSON is YAML
    return Path(file.name)
