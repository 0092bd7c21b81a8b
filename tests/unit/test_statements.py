import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from deployments.demo.statements import TOPICS, statement_rows, write_statements
from wllm_ray.digest import parse_json

ROOT = Path(__file__).parents[2]
ROWS = list(statement_rows())


@pytest.mark.requirement("U-1")
def test_a_few_hundred_rows_half_of_them_true():
    assert 300 <= len(ROWS) <= 600
    assert Counter(row["metadata"]["label"] for row in ROWS) == {
        0: len(ROWS) // 2,
        1: len(ROWS) // 2,
    }


def test_ids_are_unique_and_readable():
    ids = [row["id"] for row in ROWS]
    assert len(set(ids)) == len(ids)
    assert "capitals-france-true" in ids
    assert "animals-salmon-false" in ids


def test_no_prompt_occurs_twice():
    prompts = [row["prompt"] for row in ROWS]
    assert len(set(prompts)) == len(prompts)


def test_within_a_group_neither_subject_nor_answer_tells_the_label():
    for topic in TOPICS:
        for (first, one), (second, other) in topic.facts():
            assert first != second
            assert one != other
    groups = defaultdict(list)
    for row in ROWS:
        groups[row["metadata"]["group"]].append(row["metadata"]["label"])
    assert all(labels == [1, 0, 1, 0] for labels in groups.values())


def test_a_statement_and_its_false_twin_share_a_group():
    by_id = {row["id"]: row for row in ROWS}
    for row in ROWS:
        twin = by_id[row["id"].removesuffix("-true").removesuffix("-false") + "-false"]
        assert twin["metadata"]["group"] == row["metadata"]["group"]


def test_true_and_false_sentences_are_what_they_say():
    by_id = {row["id"]: row["prompt"] for row in ROWS}
    assert by_id["capitals-france-true"] == "The capital of France is Paris."
    assert by_id["capitals-france-false"] == "The capital of France is Rome."
    assert by_id["capitals-italy-false"] == "The capital of Italy is Paris."
    assert by_id["sums-two-plus-two-true"] == "Two plus two equals four."


def test_a_repeated_subject_within_a_topic_has_one_right_answer():
    for topic in TOPICS:
        answers = defaultdict(set)
        for pair in topic.facts():
            for subject, answer in pair:
                answers[subject].add(answer)
        assert all(len(found) == 1 for found in answers.values())


def test_the_file_is_strict_json_lines_and_is_left_alone_the_second_time(tmp_path):
    path = tmp_path / "new" / "statements.jsonl"
    assert write_statements(path) == len(ROWS)
    assert [parse_json(line) for line in path.read_bytes().splitlines()] == ROWS
    before = path.stat().st_mtime_ns
    write_statements(path)
    assert path.stat().st_mtime_ns == before


def test_the_command_writes_the_file(tmp_path):
    path = tmp_path / "s.jsonl"
    command = [sys.executable, "-m", "deployments.demo.statements", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{len(ROWS)} statements in {path}\n"
    assert len(path.read_bytes().splitlines()) == len(ROWS)
