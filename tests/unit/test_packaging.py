"""What lies where, what the wheel holds, and that what is imported is declared."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import wllm_ray

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

FOLDERS = {"wllm_ray", "deployments", "configs", "tests", "notebooks", ".ci"}
FILES = {
    ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md",
    "LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml", "serve_config.yaml",
}  # fmt: skip
# Import name → distribution, where they differ.
DISTRIBUTIONS = {"fastapi": "ray[serve]", "starlette": "ray[serve]", "sklearn": "scikit-learn"}
ENGINES = {"torch", "transformers", "vllm", "huggingface_hub"}


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?", requirement)[0].lower()


def imported(folder: str) -> dict[str, set[str]]:
    """Top-level package → the files that import it, standard library and our own left out."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in {one.partition(".")[0] for one in names}:
                if name not in sys.stdlib_module_names | {"wllm_ray", "deployments"}:
                    found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.requirement("S-1")
def test_the_top_level_holds_the_agreed_folders_and_the_usual_files():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {path.partition("/")[0] for path in listed if "/" in path} <= FOLDERS
    assert {path for path in listed if "/" not in path} <= FILES


@pytest.mark.requirement("S-1")
def test_the_wheel_holds_the_library_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"wllm_ray"}
    assert "wllm_ray/py.typed" in names
    assert "wllm_ray/dataset/FORMAT.md" in names


@pytest.mark.requirement("S-5")
def test_the_bare_install_brings_no_engine_and_no_ray():
    bare = {name_of(one) for one in PROJECT["dependencies"]}
    assert bare == {
        "httpx", "msgspec", "numpy", "obstore", "pyarrow", "pydantic", "rich", "tenacity", "typer",
    }  # fmt: skip
    assert set(PROJECT["optional-dependencies"]) == {
        "vllm", "cpu", "transformers", "serve", "probe", "export", "demo", "dev",
    }  # fmt: skip


@pytest.mark.requirement("S-5")
def test_what_the_library_imports_is_declared_by_the_extra_that_needs_it():
    bare = {name_of(one) for one in PROJECT["dependencies"]}
    extras = {
        name: {name_of(one) for one in needs}
        for name, needs in PROJECT["optional-dependencies"].items()
    }
    for package, files in imported("wllm_ray").items():
        distribution = DISTRIBUTIONS.get(package, package)
        if package in ENGINES:
            # `to_torch` is asked for by name.
            allowed = ("wllm_ray/capture/", "wllm_ray/dataset/", "wllm_ray/engines/")
        elif distribution in bare:
            continue
        elif distribution in extras["serve"]:
            allowed = ("wllm_ray/http/",)
        elif distribution in extras["probe"]:
            allowed = ("wllm_ray/probe/",)
        else:
            raise AssertionError(f"{package} is not declared; imported by {sorted(files)}")
        assert all(file.startswith(allowed) for file in files), (package, files)


@pytest.mark.requirement("S-5")
def test_what_is_imported_on_request_is_in_the_extra_that_its_error_names():
    call = re.compile(r"""require_extra\(\s*"(\w+)[\w.]*"(?:,\s*"(\w+)")?""")
    found = set()
    for path in (ROOT / "wllm_ray").rglob("*.py"):
        for package, extra in call.findall(path.read_text()):
            needs = PROJECT["optional-dependencies"][extra or "probe"]
            assert DISTRIBUTIONS.get(package, package) in map(name_of, needs), (path, package)
            found.add(package)
    assert found == {"datasets", "jinja2", "matplotlib", "safetensors", "sklearn"}


def test_the_public_names_can_be_found_before_they_are_imported():
    assert {"StorageOptions", "VLLMEngine", "load_dataset"} <= set(dir(wllm_ray))
    assert set(dir(wllm_ray)) == set(wllm_ray.__all__)
