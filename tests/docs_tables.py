"""Tables in the documentation that are made from the code.

``python tests/docs_tables.py`` rewrites them; a test checks that they are up to date.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def _args() -> str:
    from deployments.args import AppArgs

    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in AppArgs.model_fields.items():
        default = "required" if field.is_required() else f"`{field.default}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines)


def _error_codes() -> str:
    from wllm_ray.errors import ERROR_CODES

    lines = ["| code | meaning |", "|---|---|"]
    return "\n".join(lines + [f"| `{code}` | {text} |" for code, text in ERROR_CODES.items()])


def _row_failure_codes() -> str:
    from wllm_ray.errors import ROW_FAILURE_CODES

    lines = ["| code | stage | permanent | meaning |", "|---|---|---|---|"]
    for code, (stage, permanent, text) in ROW_FAILURE_CODES.items():
        lines.append(f"| `{code}` | {stage} | {'yes' if permanent else 'no'} | {text} |")
    return "\n".join(lines)


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "args": (ROOT / "configs/README.md", _args),
    "error-codes": (ROOT / "wllm_ray/README.md", _error_codes),
    "row-failure-codes": (ROOT / "wllm_ray/README.md", _row_failure_codes),
}


def current(name: str) -> str:
    """The table as the document has it."""
    path, _ = TABLES[name]
    block = rf"<!-- begin {name} -->\n(.*?)<!-- end {name} -->"
    match = re.search(block, path.read_text(), re.DOTALL)
    assert match, f"{path} has no markers for the table {name!r}"
    return match[1].strip()


def rewrite() -> None:
    """Put every table into its document."""
    for name, (path, make) in TABLES.items():
        old = path.read_text()
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, rest = old.split(begin)
        _, tail = rest.split(end)
        path.write_text(f"{head}{begin}{make()}\n{end}{tail}")


if __name__ == "__main__":
    rewrite()
