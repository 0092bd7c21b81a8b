"""How commands talk: errors in one form, facts as one JSON line, everything else on stderr."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer

from wllm_ray.errors import WLLMError

__all__ = [
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "ROWS_FAILED",
    "fail",
    "print_json",
    "reports_errors",
    "say",
]

P = ParamSpec("P")
Result = TypeVar("Result")

DONE, ROWS_FAILED, FAILED, INTERRUPTED = 0, 1, 2, 130


def say(text: str) -> None:
    """A message for people, on stderr."""
    typer.echo(text, err=True)


def print_json(value: dict[str, Any]) -> None:
    """One line for programs, on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=True, allow_nan=False))


def fail(error: WLLMError) -> NoReturn:
    """End a command whose last line on stdout is always JSON."""
    _say_error(error)
    print_json({"status": "error", "exit_code": FAILED, **error.to_json()})
    raise typer.Exit(FAILED) from None


def reports_errors(command: Callable[P, Result]) -> Callable[P, Result]:
    """Turn exceptions of a command into messages and exit codes."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return command(*args, **kwargs)
        except WLLMError as error:
            _say_error(error)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            say("interrupted; what is written stays, and running again goes on from there")
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:  # noqa: BLE001 (the last border of the process)
            _say_unexpected(error)
            raise typer.Exit(FAILED) from None

    return run


def _say_error(error: WLLMError) -> None:
    stage = f" in {error.stage}" if error.stage else ""
    lines = [f"error [{error.code}]{stage}: {error.message}"]
    if problems := _line_problems(error):
        # The message has them all in one line, which nobody reads.
        head = error.message.partition(": line ")[0]
        lines = [f"error [{error.code}]{stage}: {head}"]
        lines += [f"  line {one['line']}: {one['message']}" for one in problems]
        if (more := error.details["count"] - len(problems)) > 0:
            lines.append(f"  and {more} more")
    say("\n".join(lines))


def _line_problems(error: WLLMError) -> list[dict[str, Any]]:
    return error.details.get("problems", []) if error.code == "invalid_rows" else []


def _say_unexpected(error: Exception) -> None:
    """Type and place only: the text of a foreign exception may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    sys.stderr.write(frames)
    say(
        f"error [internal_error]: an unexpected {type(error).__name__}; this is a fault of wllm, "
        f"please report it with the lines above"
    )
