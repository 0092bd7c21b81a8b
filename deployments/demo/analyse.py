"""The reader's half of the demo: from a committed dataset to a picture, with no model and no Ray.

Run as its own process by the demo, so that it can prove what it says: neither torch nor ray is
imported.

    python -m deployments.demo.analyse STORAGE_ROOT DATASET_ID OUT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.digest import canonical_json
from wllm_ray.probe import ProbeReport, load_probe, plot_probe_report, probe_by_layer, save_probe

__all__ = ["NUMBERS", "PICTURE", "analyse"]

NUMBERS = "probe_by_layer.json"
PICTURE = "probe_by_layer.png"
QUESTION = "Can a linear probe tell true statements from false ones? (label)"
_HEAVY = ("ray", "torch", "transformers", "vllm")


def analyse(root: str, dataset_id: str, out: Path) -> ProbeReport:
    """Load and verify the dataset, fit the probes, and write best probe, picture and numbers.

    The numbers come last: where they name a dataset, all the rest is that dataset's too.
    """
    dataset = load_dataset(root, dataset_id, verify="full")
    report = probe_by_layer(dataset, label="label", group="group", positive_label="topic")
    out.mkdir(parents=True, exist_ok=True)
    best = report.best.probe
    save_probe(best, out / "probe")
    features = dataset.site(best.site)
    if load_probe(out / "probe").predict(features) != best.predict(features):
        raise RuntimeError(f"the probe saved in {out / 'probe'} predicts otherwise than the fitted")
    _replace(out / PICTURE, lambda path: plot_probe_report(report, path, question=QUESTION))
    _replace(out / NUMBERS, lambda path: path.write_bytes(canonical_json(report.to_json())))
    return report


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is whole wherever it is seen; a partial one keeps the suffix."""
    partial = path.with_name(f".partial-{path.name}")
    write(partial)
    partial.replace(path)


def _table(report: ProbeReport) -> Table:
    table = Table(title=f"{report.label} by layer, {len(report.test_ids)} test rows")
    table.add_column("site")
    for column in ("accuracy", "95 % interval", "shuffled labels", f"{report.positive_label}"):
        table.add_column(column, justify="right")
    for result in report.results:
        scores = (result.score, result.negative_control, result.positive_control)
        own, negative, positive = (score.accuracy if score else float("nan") for score in scores)
        interval = f"{result.score.low:.2f} to {result.score.high:.2f}"
        cells = (result.probe.site, f"{own:.2f}", interval, f"{negative:.2f}", f"{positive:.2f}")
        table.add_row(*cells, style="bold" if result is report.best else None)
    return table


def main() -> None:
    """Analyse what the command line names, and prove that it took a CPU reader only."""
    parser = argparse.ArgumentParser(description="Probe a committed dataset, layer by layer.")
    parser.add_argument("root", help="the storage root")
    parser.add_argument("dataset_id")
    parser.add_argument("out", type=Path, help="the folder for picture, numbers and probe")
    given = parser.parse_args()
    report = analyse(given.root, given.dataset_id, given.out)
    heavy = [name for name in _HEAVY if name in sys.modules]
    if heavy:
        raise RuntimeError(f"reading a dataset must not import {', '.join(heavy)}")
    console = Console()
    console.print(_table(report))
    console.print("Read and probed without importing " + ", ".join(_HEAVY) + ".")


if __name__ == "__main__":
    main()
