"""Tests of the wheel and the source distribution."""

import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from benchmarks.client_install import MAX_BYTES, MAX_IMPORT_S, build_distributions, measure

import graftwork
from tests.test_layout import OTHER_FOLDERS, ROOMS
from tests.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def tracked_files() -> set[str]:
    """Every file of the package that git knows, by its path below the package."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *ROOMS, *OTHER_FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.mark.slow
def test_both_distributions_hold_every_room(tmp_path: Path) -> None:
    """The wheel and the source distribution have every file of every room."""
    wheel, source = build_distributions(tmp_path)

    with zipfile.ZipFile(wheel) as wheel_file, tarfile.open(source) as source_file:
        in_wheel = set(wheel_file.namelist())
        in_source = {name.partition("/")[2] for name in source_file.getnames()}
    assert {f"graftwork/{name}" for name in tracked_files()} - in_wheel == set()
    assert {f"src/graftwork/{name}" for name in tracked_files()} - in_source == set()
    assert "graftwork/py.typed" in in_wheel
    assert not [name for name in in_source if name.startswith("tests/")]


@pytest.mark.slow
def test_the_client_alone_is_small_and_quick(tmp_path: Path) -> None:
    """A fresh environment with the client stays under 80 MB, without torch, and imports in under 0.3 s."""
    figures = measure(tmp_path)

    assert figures.environment_bytes < MAX_BYTES
    assert figures.import_s < MAX_IMPORT_S
    assert not [package for package in figures.packages if package.startswith(("torch", "fastapi", "numpy"))]


def test_the_version_has_one_home() -> None:
    """The version is only in the package, and pyproject.toml reads it from there."""
    readers = [
        str(path.relative_to(ROOT))
        for folder in ROOMS
        for path in (ROOT / folder).rglob("*.py")
        if f'"{graftwork.__version__}"' in path.read_text("utf-8")
    ]

    assert PROJECT["dynamic"] == ["version"]
    assert "version" not in PROJECT
    assert readers == []


def test_readme_links_work_on_a_package_index() -> None:
    """Each link in README is absolute and leads to a file of the project."""
    base = f"{PROJECT['urls']['Repository']}/blob/main/"
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text("utf-8"))

    assert links
    assert [link for link in links if not link.startswith(base)] == []
    assert [link for link in links if not (ROOT / link.removeprefix(base)).exists()] == []
