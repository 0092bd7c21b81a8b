"""How commands talk: errors in one form, facts as one JSON line, everything else on stderr."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand

from wllm_ray.cli.interruption import sigterm_interrupts
from wllm_ray.errors import InvalidInputError, WLLMError

__all__ = [
    "DONE",
    "FAILED",
    "READER_GONE",
    "ROWS_FAILED",
    "Command",
    "EndsWithJson",
    "counted",
    "ends_with_json",
    "fail",
    "needs_extra",
    "print_json",
    "printable",
    "reports_errors",
    "say",
    "say_error",
]

# Typer carries its own copy of click, whose names are not public.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

P = ParamSpec("P")
Result = TypeVar("Result")

DONE, ROWS_FAILED, FAILED = 0, 1, 2
READER_GONE = 128 + signal.SIGPIPE  # as shells count
STDOUT, STDERR = 1, 2
ADVICE = {"unauthorized": "set WLLM_API_KEY to the application's key"}


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str, *, keep: str = "") -> str:
    """Text as it can be shown: what is no letter, sign or space is escaped.

    A terminal would obey control characters, and half a surrogate pair has no bytes.

    Args:
        text: Text of which nobody knows where it has been.
        keep: Characters that stay all the same.
    """
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode()
        for one in text
    )


def say(text: str) -> None:
    """A message for people, on stderr."""
    typer.echo(text, err=True)


def print_json(value: dict[str, Any]) -> None:
    """One line for programs, on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=True, allow_nan=False))


def fail(error: WLLMError) -> NoReturn:
    """End a command whose last line on stdout is always JSON."""
    say_error(error)
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


class Command(TyperCommand):
    """A command that says of an option only what the option's own rule says."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the options."""
        try:
            return super().make_context(*args, **options)
        except typer.BadParameter as error:
            # Typer has pydantic read options, which puts this before the message of a ValueError.
            error.message = error.message.removeprefix("Value error, ")
            raise


class EndsWithJson(Command):
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
    """Turn exceptions of a command into messages and exit codes.

    What stdout's encoding has no bytes for is escaped.
    """
    return _reporting(command, lambda _end: None)


def ends_with_json(command: Callable[P, Result]) -> Callable[P, Result]:
    """As :func:`reports_errors`, for a command whose last line on stdout is always JSON."""
    return _reporting(command, print_json)


def _reporting(
    command: Callable[P, Result], tell: Callable[[dict[str, Any]], None]
) -> Callable[P, Result]:
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        _escape_what_stdout_cannot_say()
        # Twice: what the command writes, and what is written about its end.
        with _ends_with_reader(), sigterm_interrupts() as interrupted_code:
            try:
                with _ends_with_reader():
                    return command(*args, **kwargs)
            except WLLMError as error:
                say_error(error)
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


def _escape_what_stdout_cannot_say() -> None:
    """As stderr does from the beginning; for the rest of the process, which is the command's."""
    # Not every stream that takes stdout's place has this.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _ends_with_reader() -> Iterator[None]:
    """End quietly where whoever read the output has seen enough, as `head` has."""
    try:
        yield
    except BrokenPipeError:
        if _reader_is_gone():
            raise typer.Exit(READER_GONE) from None
        raise


def _reader_is_gone() -> bool:
    """Whether nobody reads stdout or stderr any more; what is still to be written there is lost."""
    asked = select.poll()
    for descriptor in (STDOUT, STDERR):
        asked.register(descriptor, 0)  # an error is told whatever is asked for
    gone = [descriptor for descriptor, _ in asked.poll(0)]
    for descriptor in gone:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(gone)


def say_error(error: WLLMError) -> None:
    """An error with its code and what to do, on stderr."""
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
    say(printable("\n".join(lines), keep="\n"))


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
    say_error(found)
    return found
