"""Check the application's arguments without starting anything, and without Ray.

``python -m deployments.check KEY=VALUE…`` takes them as ``serve run`` does, and
``python -m deployments.check serve_config.yaml`` those of every application in a file. Exits with
2 and one line per problem where there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deployments.args import AppArgs
from wllm_ray.validation import field_problems

__all__ = ["main", "problems_of"]

BUILDER = "deployments.app:build_app"


def problems_of(args: Any) -> list[str]:
    """What is wrong with an application's arguments, one line per problem."""
    try:
        AppArgs.model_validate(args)
    except ValidationError as error:
        problems = field_problems(error, AppArgs, quoting=True)
        # The model's own check of the names is about no single field.
        return [
            one["message"] if one["field"] == "body" else f"{one['field']}: {one['message']}"
            for one in problems
        ]
    return []


def _problems_of_file(path: Path) -> Iterator[str]:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        applications = [(one["import_path"], one) for one in config["applications"]]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        yield f"{path} is not a Serve config file ({type(error).__name__})"
        return
    for import_path, application in applications:
        if import_path == BUILDER:
            name = application.get("name", "default")
            for problem in problems_of(application.get("args") or {}):
                yield f"application {name!a}: {problem}"


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong, and return the exit code."""
    if len(arguments) == 1 and "=" not in arguments[0]:
        problems = list(_problems_of_file(Path(arguments[0])))
    else:
        problems = problems_of(dict(one.split("=", 1) for one in arguments))
    for problem in problems:
        print(problem)  # noqa: T201 (a command's output)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
