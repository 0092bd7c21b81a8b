"""How commands talk: errors in one form, facts as one JSON line, everything else on stderr."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand

from wllm_ray.errors import InvalidInputError, WLLMError

__all__ = [
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "ROWS_FAILED",
    "TERMINATED",
    "EndsWithJson",
    "counted",
    "ends_with_json",
    "fail",
    "needs_extra",
    "print_json",
    "reports_errors",
    "say",
]

# Typer carries its own copy of click, whose names are not public.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

P = ParamSpec("P")
Result = TypeVar("Result")

DONE, ROWS_FAILED, FAILED = 0, 1, 2
# As shells count: 128 and the signal's number.
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
ADVICE = {"unauthorized": "set WLLM_API_KEY to the application's key"}


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def say(text: str) -> None:
    """A message for people, on stderr."""
    typer.echo(text, err=True)


def print_json(value: dict[str, Any]) -> None:
    """One line for programs, on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=True, allow_nan=False))


def fail(error: WLLMError) -> NoReturn:
    """End a command whose last line on stdout is always JSON."""
    _say_error(error)
    print_json(_failure(error))
    raise typer.Exit(FAILED) from None


@contextlib.contextmanager
def needs_extra() -> Iterator[None]:
    """A package that an extra brings may be missing; the message says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        say(f"error: {error.msg}")
        raise typer.Exit(FAILED) from None


def _failure(error: WLLMError) -> dict[str, Any]:
    return {"status": "error", "exit_code": FAILED, **error.to_json()}


class EndsWithJson(TyperCommand):
    """A command whose last line on stdout is JSON also where its options cannot be read."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the options."""
        try:
            return super().make_context(*args, **options)
        except _UsageError as error:
            message = getattr(error, "format_message", error.__str__)()
            print_json(_failure(InvalidInputError(message, code="invalid_argument")))
            raise


def reports_errors(command: Callable[P, Result]) -> Callable[P, Result]:
    """Turn exceptions of a command into messages and exit codes."""
    return _reporting(command, lambda _end: None)


def ends_with_json(command: Callable[P, Result]) -> Callable[P, Result]:
    """As :func:`reports_errors`, for a command whose last line on stdout is always JSON."""
    return _reporting(command, print_json)


def _reporting(
    command: Callable[P, Result], tell: Callable[[dict[str, Any]], None]
) -> Callable[P, Result]:
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        with _sigterm_interrupts() as interrupted_code:
            try:
                return command(*args, **kwargs)
            except WLLMError as error:
                _say_error(error)
                tell(_failure(error))
                raise typer.Exit(FAILED) from None
            except KeyboardInterrupt:
                code = interrupted_code()
                say("interrupted; what is written stays, and running again goes on from there")
                tell({"status": "interrupted", "exit_code": code})
                raise typer.Exit(code) from None
            except (typer.Exit, typer.Abort, typer.BadParameter):
                raise
            except Exception as error:  # noqa: BLE001 (the last border of the process)
                tell(_failure(_say_unexpected(error)))
                raise typer.Exit(FAILED) from None

    return run


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[Callable[[], int]]:
    """Let SIGTERM do what SIGINT does; yields what tells the exit code of an interruption."""
    code = INTERRUPTED

    def interrupt(_number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = TERMINATED
        # Called rather than sent: a shell's background jobs ignore SIGINT.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield lambda: code
    finally:
        signal.signal(signal.SIGTERM, before)


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
    if advice := ADVICE.get(error.code):
        lines.append(f"  {advice}")
    say("\n".join(lines))


def _line_problems(error: WLLMError) -> list[dict[str, Any]]:
    return error.details.get("problems", []) if error.code == "invalid_rows" else []


def _say_unexpected(error: Exception) -> WLLMError:
    """Type and place only: the text of a foreign exception may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    sys.stderr.write(frames)
    found = WLLMError(
        f"an unexpected {type(error).__name__}; this is a fault of wllm, please report it with "
        f"the lines above"
    )
    _say_error(found)
    return found
