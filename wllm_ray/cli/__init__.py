"""The command line, ``wllm``.

Exit codes: 0 done · 1 rows failed · 2 input, output, transport or integrity error · 130
interrupted (SIGINT) · 143 terminated (SIGTERM). Results go to stdout, progress and messages to
stderr. Each command imports what it needs when it runs, so that ``wllm --help`` costs nothing.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wllm_ray._version import __version__
from wllm_ray.cli import activations, datasets, doctor, export, gc, merge, report, serve, wait_ready
from wllm_ray.cli.reporting import EndsWithJson

__all__ = ["app", "main"]

app = typer.Typer(
    name="wllm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # joins the lines of a docstring's paragraph
    # Our own report says what to do and never shows local variables, which may hold prompts.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:  # noqa: FBT001 (typer's callback signature)
    if wanted:
        typer.echo(f"wllm {__version__}")
        raise typer.Exit


@app.callback()
def _wllm(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Reproducible, checksum-verified activation datasets from language models.

    Exit codes: 0 done, 1 rows failed, 2 input, output, transport or integrity error, 130
    interrupted (SIGINT), 143 terminated (SIGTERM).
    """


app.command("activations", cls=EndsWithJson)(activations.activations)
app.command("wait-ready")(wait_ready.wait_until_ready)
app.command("doctor")(doctor.doctor)
app.command("verify")(datasets.verify)
app.command("inspect")(datasets.inspect)
app.command("gc")(gc.gc)
app.command("merge")(merge.merge)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("serve")(serve.serve)


def main() -> None:
    """Entry point of the ``wllm`` script."""
    app()
