"""The benchmark command: what it says of itself, not how fast anything is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.bench.__main__ import main
from tests.bench.harness import (
    Benchmark,
    Measure,
    NotRunError,
    Outcome,
    Settings,
    interleaved,
    speed_ratio,
)
from tests.bench.markdown import render, shown
from tests.bench.registry import BENCHMARKS
from tests.bench.results import exit_code, run_benchmarks

pytestmark = pytest.mark.requirement("B-7")

CHEAP = ("importing", "staging", "run-job")
FACTS = ("date", "processor", "cores", "memory_bytes", "load_average", "versions", "commit")


def run(tmp_path, *benchmarks: Benchmark, quick: bool = False):
    return run_benchmarks(benchmarks, Settings(tmp_path, Path("nowhere"), quick))


def benchmark(name: str, *measures: Measure, error: Exception | None = None) -> Benchmark:
    def answer(_settings: Settings) -> Outcome:
        if error is not None:
            raise error
        return Outcome(list(measures), {"rows": 3}, {"a": [1.0]})

    return Benchmark(name, "B-0", f"What {name} measures.", answer)


def section(report: str, name: str) -> str:
    return re.split(r"^## ", report.partition(f"## {name} ")[2], flags=re.MULTILINE)[0]


def table(text: str) -> dict[str, tuple[str, str]]:
    """Measure → (found, verdict)."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    return {name: (found, verdict) for name, found, _, verdict in rows[1:]}


def test_a_quick_run_writes_json_and_the_report_of_that_json_alone(tmp_path, capsys):
    assert main(["--quick", "--out", str(tmp_path), "--only", *CHEAP]) == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    report = (tmp_path / "bench.md").read_text()
    assert report == render(results) == capsys.readouterr().out
    assert all(results["machine"][name] for name in FACTS)
    assert (
        f"\n- accelerators: {', '.join(results['machine']['accelerators']) or 'none'}\n" in report
    )
    assert [one["name"] for one in results["benchmarks"]] == [one.name for one in BENCHMARKS]
    for one in results["benchmarks"]:
        text = section(report, one["name"])
        if one["name"] in CHEAP:
            found = {m["name"]: f"{shown(m['value'])} {m['unit']}" for m in one["measures"]}
            assert {name: value for name, (value, _) in table(text).items()} == found
            assert all(m["met"] is None for m in one["measures"]), "a quick run judges nothing"
            assert all(one["seconds"].values())
        else:
            assert one["reason"] == "not asked for"
            assert table(text) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


SMI = """#!/bin/sh
test "$*" = "--query-gpu=name --format=csv,noheader" && printf 'NVIDIA H200\nNVIDIA L4\n'
"""


@pytest.mark.parametrize(("named", "said"), [(["NVIDIA H200", "NVIDIA L4"], None), ([], "none")])
def test_accelerators_are_those_that_the_driver_names(tmp_path, monkeypatch, named, said):
    if named:
        (tmp_path / "nvidia-smi").write_text(SMI)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    results = run(tmp_path)
    assert results["machine"]["accelerators"] == named
    assert f"\n- accelerators: {said or 'NVIDIA H200, NVIDIA L4'}\n" in render(results)


@pytest.mark.slow
def test_everything_runs_quickly_but_for_the_engine(tmp_path):
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "bench.json").read_text())["benchmarks"]
    assert {one["name"] for one in entries if one["status"] != "run"} == {"depth"}


def test_what_did_not_run_has_a_reason_and_no_number(tmp_path):
    results = run(tmp_path, benchmark("a", error=NotRunError("there is no GPU")))
    assert results["benchmarks"][0].keys() == {"name", "requirement", "what", "status", "reason"}
    text = section(render(results), "a")
    assert "not run: there is no GPU" in text
    assert not re.search(r"\d", text.replace("B-0", ""))
    assert exit_code(results) == 0


def test_a_missed_bound_is_said_and_makes_the_exit_code_1(tmp_path):
    good, bad = Measure("good", 0.8, "×", least=0.8), Measure("bad", 0.201, "s", most=0.2)
    free = Measure("free", 12_345.6, "rows/s")
    results = run(tmp_path, benchmark("a", good, free), benchmark("b", bad))
    report = render(results)
    assert table(section(report, "a")) == {"good": ("0.8 ×", "met"), "free": ("12,346 rows/s", "")}
    assert table(section(report, "b")) == {"bad": ("0.201 s", "**MISSED**")}
    assert exit_code(results) == 1
    assert exit_code(run(tmp_path, benchmark("a", good, free))) == 0
    assert exit_code(run(tmp_path, benchmark("b", bad), quick=True)) == 0


def test_a_benchmark_that_fails_is_named_and_the_others_run(tmp_path, capsys):
    one = Measure("m", 1.0, "s")
    results = run(tmp_path, benchmark("a", error=OSError("disk full")), benchmark("b", one))
    assert [entry["status"] for entry in results["benchmarks"]] == ["failed", "run"]
    assert "failed: OSError: disk full" in section(render(results), "a")
    assert exit_code(results) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_ratio_is_of_one_round_and_the_median_of_them():
    seconds = {"ours": [1.0, 10.0, 2.0], "sha": [1.0, 9.0, 1.0], "write": [0.5, 12.0, 3.0]}
    assert speed_ratio(seconds, "ours", "sha") == 0.9
    assert speed_ratio(seconds, "ours", "sha", "write") == 1.2


def test_rounds_are_interleaved_and_the_first_does_not_count():
    ran: list[str] = []

    def call(name: str) -> float:
        ran.append(name)
        return float(len(ran))

    seconds = interleaved(2, {"a": lambda: call("a"), "b": lambda: call("b")})
    assert ran == ["b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path / "out"), "--only", "speed"])
    assert "stream-to-disk" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
