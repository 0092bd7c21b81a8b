"""``python -m tests.bench``: measures, writes ``bench.json``, and from it ``bench.md``.

Exit codes: 0 all bounds are kept, 1 one is missed or a benchmark failed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.harness import Settings
from tests.bench.markdown import render
from tests.bench.registry import BENCHMARKS
from tests.bench.results import exit_code, run_benchmarks

DEFAULT_MODEL = Path(".demo/models/gemma-3-270m")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    # Beside the results, so that --out chooses the disk that is measured.
    with TemporaryDirectory(prefix="work-", dir=asked.out) as work:
        settings = Settings(Path(work).resolve(), asked.model.resolve(), asked.quick)
        results = run_benchmarks(BENCHMARKS, settings, asked.only)
    (asked.out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    report = render(results)
    (asked.out / "bench.md").write_text(report)
    sys.stdout.write(report)
    return exit_code(results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    names = [one.name for one in BENCHMARKS]
    parser.add_argument(
        "--out", type=Path, default=Path(".bench"), help="folder for results and files"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], choices=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is judged")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a model's folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
