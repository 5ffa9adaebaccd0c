"""Tests of the lock files: they agree with constraints.txt and pyproject.toml, and every file in them has its hash."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
GATEWAY = ROOT / "requirements" / "gateway.lock"
LOCKS = [ROOT / "requirements" / name for name in ("server.lock", "server-cpu.lock", "server-own-torch.lock")]
OF_CUDA = re.compile(r"(torch|cuda-|nvidia-)")
"""The packages that the lock file for the CPU leaves out, because torch for the CPU comes from another index."""


def logical_lines(path: Path) -> list[str]:
    """The requirements of a file, each with its continued lines, without comments."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def versions(path: Path) -> dict[str, str]:
    """The pinned version of each package of a file, by its normalised name."""
    found: dict[str, str] = {}
    for line in logical_lines(path):
        requirement = Requirement(line.partition(" --hash")[0])
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        assert found.setdefault(canonicalize_name(requirement.name), pin.version) == pin.version, line
    return found


def requirements_of(extra: str) -> list[Requirement]:
    """What `graftwork[extra]` names itself, and what the extras name that it includes."""
    found = [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    included = [name for one in found if one.name == "graftwork" for name in one.extras]
    own = [one for one in found if one.name != "graftwork"]
    return [
        *map(Requirement, PROJECT["dependencies"]),
        *own,
        *(one for name in included for one in requirements_of(name)),
    ]


@pytest.mark.parametrize("path", [GATEWAY, *LOCKS], ids=lambda path: path.name)
def test_every_locked_package_has_hashes(path: Path) -> None:
    """Each line has at least one sha256, and nothing but packages of an index."""
    for line in logical_lines(path):
        hashes = re.findall(r"--hash=(\S+)", line)

        assert hashes, line
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", found) for found in hashes), line
        assert " @ " not in line


@pytest.mark.parametrize("path", [GATEWAY, *LOCKS], ids=lambda path: path.name)
def test_what_the_server_needs_is_locked_in_the_tested_version(path: Path) -> None:
    """Each dependency of `[server]`, or of `[gateway]`, is locked, in a version of its range, and all versions are those of
    the constraints."""
    locked, tested = versions(path), versions(ROOT / "constraints.txt")

    for requirement in requirements_of("gateway" if path == GATEWAY else "server"):
        name = canonicalize_name(requirement.name)
        if path.name != "server.lock" and OF_CUDA.match(name):
            continue
        assert name in locked, f"{name}: run `make lock`"
        assert requirement.specifier.contains(locked[name]), f"{name}: run `make lock`"
    differing = {
        name: (version, tested[name]) for name, version in locked.items() if tested.get(name, version) != version
    }
    assert differing == {}, "run `make lock`"


def test_the_lock_of_a_gateway_computes_nothing() -> None:
    """A gateway's lock file is a part of the server's, without what only an engine needs."""
    gateway, server = versions(GATEWAY), versions(LOCKS[0])

    assert gateway.items() <= server.items()
    assert gateway.keys().isdisjoint({"torch", "triton", "numba", "safetensors", "xgrammar", "llguidance"})


def test_the_lock_for_the_cpu_leaves_out_cuda_alone() -> None:
    """The two files differ in torch and the CUDA packages, and in nothing else."""
    whole, of_cpu = (versions(path) for path in LOCKS[:2])

    assert whole.items() >= of_cpu.items()
    assert {name for name in whole if OF_CUDA.match(name)} == whole.keys() - of_cpu.keys()
    assert "torch" in whole


def test_the_lock_for_another_torch_leaves_out_its_triton_too() -> None:
    """Each build of torch for CUDA demands one version of triton, so the file without torch names no triton."""
    of_cpu, without_torch = (versions(path) for path in LOCKS[1:])

    assert of_cpu.items() - without_torch.items() == {("triton", of_cpu["triton"])}
    assert of_cpu.items() >= without_torch.items()


def test_the_constraints_fit_every_declared_range() -> None:
    """The version of each package in constraints.txt is in the range of pyproject.toml, and each direct dependency has one."""
    tested = versions(ROOT / "constraints.txt")

    for extra, lines in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        for line in lines:
            requirement = Requirement(line)
            name = canonicalize_name(requirement.name)
            if name != "graftwork":
                assert requirement.specifier.contains(tested[name]), f"{extra}: {line}"


def test_triton_is_the_version_that_torch_demands() -> None:
    """PyPI's torch for Linux pins one version of triton, so constraints.txt may name no other.

    The lock file proves it: it was resolved with torch's own metadata.
    """
    assert versions(LOCKS[0])["triton"] == versions(ROOT / "constraints.txt")["triton"]
