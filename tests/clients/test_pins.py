"""Tests of the files that say which versions are installed."""

import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REGISTRY = "https://registry.npmjs.org/"


@pytest.mark.parametrize("path", sorted(HERE.glob("requirements/*.txt")), ids=lambda path: path.stem)
def test_requirements_name_one_version_of_each_package(path: Path) -> None:
    """A file of requirements has nothing but exact versions, so that an environment is the same everywhere."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert lines
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


@pytest.mark.parametrize("folder", sorted(HERE.glob("packages/*")), ids=lambda path: path.name)
def test_locks_come_from_the_public_registry(folder: Path) -> None:
    """A lock file has the digest of every package, and no address but the public registry's."""
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    lock = json.loads((folder / "package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}

    assert [version for version in wanted.values() if not version[0].isdigit()] == []
    assert [name for name, package in packages.items() if "integrity" not in package] == []
    assert [
        name for name, package in packages.items() if not package.get("resolved", REGISTRY).startswith(REGISTRY)
    ] == []
