"""The documentation says what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from tests.docs_tables import ROOT, TABLES, current
from wllm_ray.errors import ERROR_CODES, ROW_FAILURE_CODES

SPEC_ID = re.compile(r"\b([A-Z]-\d+)\b")


@pytest.mark.requirement("U-5")
@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_table_made_from_the_code_is_up_to_date(name):
    _, make = TABLES[name]
    assert current(name) == make(), "run `python tests/docs_tables.py`"


@pytest.mark.requirement("H-7")
def test_every_code_that_the_sources_raise_is_in_the_index():
    used = set()
    for folder in ("wllm_ray", "deployments"):
        for path in (ROOT / folder).rglob("*.py"):
            used |= set(re.findall(r"""(?<!-)\bcode="([a-z_]+)\"""", path.read_text()))
            used |= set(re.findall(r"""RowFailure\.of\(\s*"([a-z_]+)\"""", path.read_text()))
    unknown = used - set(ERROR_CODES) - set(ROW_FAILURE_CODES)
    assert not unknown


def marked_requirements() -> dict[str, set[str]]:
    """Requirement id → the test files that carry a mark for it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for arguments in re.findall(r"mark\.requirement\(([^)]*)\)", path.read_text()):
            for one in SPEC_ID.findall(arguments):
                found.setdefault(one, set()).add(path.relative_to(ROOT / "tests").as_posix())
    return found


def listed_requirements() -> dict[str, str]:
    """Requirement id → its line in tests/README.md."""
    lines = (ROOT / "tests/README.md").read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| [A-Z]-\d+ \|", line)]
    return {SPEC_ID.findall(line)[0]: line for line in rows}


def test_the_list_of_requirements_and_the_marks_agree():
    marked, listed = marked_requirements(), listed_requirements()
    assert set(marked) == set(listed)
    for one, line in listed.items():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        assert all(cells), f"{one}: say what it asks and which fault its test catches"


@pytest.mark.requirement("R-1")
@pytest.mark.parametrize(
    "path", [ROOT / "serve_config.yaml", *sorted((ROOT / "configs").glob("*.yaml"))], ids=str
)
def test_a_shipped_configuration_is_valid(path: Path):
    serve_schema = pytest.importorskip("ray.serve.schema")
    from deployments.args import AppArgs

    config = yaml.safe_load(path.read_text())
    serve_schema.ServeDeploySchema.model_validate(config)
    assert config["http_options"]["host"] == "127.0.0.1", "loopback unless somebody decides else"
    for application in config["applications"]:
        AppArgs.model_validate(application["args"])


def test_serve_config_shows_and_explains_every_knob():
    text = (ROOT / "serve_config.yaml").read_text()
    from deployments.args import AppArgs

    rare = {"kv_cache_memory_bytes", "trust_remote_code", "allow_unprofiled_vllm", "num_cpus"}
    missing = [name for name in AppArgs.model_fields if f"{name}:" not in text]
    assert set(missing) <= rare
