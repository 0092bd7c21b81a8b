"""The command line, ``wllm``.

Exit codes: 0 done · 1 rows failed · 2 input, output, transport or integrity error · 130
interrupted (SIGINT) · 141 nobody reads the output any more (SIGPIPE) · 143 terminated (SIGTERM).
Results go to stdout, progress and messages to stderr. Each command imports what it needs when it
runs, so that ``wllm --help`` costs nothing.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wllm_ray._version import __version__
from wllm_ray.cli import activations, datasets, doctor, export, gc, merge, report, serve, wait_ready
from wllm_ray.cli.reporting import Command, EndsWithJson

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
    interrupted (SIGINT), 141 nobody reads the output any more (SIGPIPE), 143 terminated (SIGTERM).
    """


app.command("activations", cls=EndsWithJson)(activations.activations)
app.command("wait-ready", cls=Command)(wait_ready.wait_until_ready)
app.command("doctor", cls=Command)(doctor.doctor)
app.command("verify", cls=Command)(datasets.verify)
app.command("inspect", cls=Command)(datasets.inspect)
app.command("gc", cls=Command)(gc.gc)
app.command("merge", cls=Command)(merge.merge)
app.command("report", cls=Command)(report.report)
app.command("export", cls=Command)(export.export)
app.command("serve", cls=Command)(serve.serve)


def main() -> None:
    """Entry point of the ``wllm`` script."""
    app()
