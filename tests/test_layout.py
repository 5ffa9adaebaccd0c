"""Tests of the tree: its rooms, their imports, and what each process loads."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.tree import HOUSE, ROOT, imports, modules

OTHER_FOLDERS = ("migrations", "demo")
ROOMS = (
    "platform",
    "platform/settings",
    "platform/prices",
    "platform/answers",
    "platform/activity",
    "platform/quotas",
    "platform/gateways",
    "platform/replicas",
    "platform/tracing",
    "platform/keys",
    "platform/outbound",
    "platform/contents",
    "platform/tenancy",
    "platform/encryption",
    "platform/people",
    "platform/oidc",
    "platform/ledger",
    "platform/ledger/upkeep",
    "platform/batches",
    "platform/alerts",
    "platform/modes",
    "platform/retention",
    "platform/exports",
    "platform/monitoring",
    "engine/core",
    "engine/kernels",
    "engine/quantization",
    "engine/model",
    "engine/quantization/triton",
    "engine/experts",
    "engine/experts/triton",
    "engine/grammar/patterns",
    "engine/grammar/schema",
    "engine/grammar/matching",
    "engine/grammar/compile",
    "engine/grammar",
    "engine/sampling",
    "engine/sampling/device",
    "engine/speculative",
    "engine/kv/disk",
    "engine/kv/index",
    "engine/kv/transfer",
    "engine/kv",
    "engine/lora",
    "engine/lora/triton",
    "engine/attention",
    "engine/recurrence",
    "engine/runner",
    "engine/draft_head",
    "engine/parallel",
    "engine/step_recorder.py",
    "engine/scheduler/order",
    "engine/scheduler",
    "engine/arrivals.py",
    "engine/messages.py",
    "engine/step_pipeline.py",
    "engine/loop.py",
    "engine/build",
    "engine/evaluation",
    "engine/rpc",
    "engine/fleet",
    "adapters/format",
    "adapters/inspection",
    "adapters/registry",
    "adapters/sources",
    "adapters/uploads",
    "sessions/text",
    "sessions/tools",
    "sessions/core",
    "sessions/generation",
    "sessions/store",
    "sessions/turns",
    "sessions/sweeper.py",
    "sessions/eraser.py",
    "sessions/service.py",
    "sessions/responses",
    "api/sdk/transport",
    "api/sdk/login",
    "api/sdk",
    "api/schemas",
    "api/http",
    "api/overview",
    "api/deps",
    "api/openapi",
    "api/inference",
    "api/formats",
    "api/anthropic",
    "api/console",
    "api/people",
    "api/routes/tenancy",
    "api/routes",
    "api/batches",
    "api/rights",
    "api/uploads",
    "api/server",
    "api/ray",
    "api/cli/console",
    "api/cli/demo",
    "api/cli/bench",
    "api/cli/plan",
    "api/cli/chaos",
    "api/cli/top",
    "api/cli/doctor",
    "api/cli/admin",
    "api/cli/commands",
    "api/cli",
)
"""Every room from the ground up: a module may import its own room and the rooms that stand before it in this list."""
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES = 20, 400, 60
"""The modules of a room, the lines of a file, and of a function with its docstring: what needs more has two subjects."""


def output_of(*lines: str) -> str:
    """What a fresh interpreter, started at the root, prints for a program."""
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_room_is_a_package_of_its_own() -> None:
    """No room has an `__init__.py`, which would shadow a module of the standard library."""
    found = {
        path.relative_to(ROOT)
        for folder in (*HOUSE, *OTHER_FOLDERS, "tests", "benchmarks", "src")
        for path in (ROOT / folder).rglob("__init__.py")
    }

    assert found == {Path("src/graftwork/__init__.py")}


def test_the_root_does_not_shadow_the_standard_library() -> None:
    """At the root, `import platform` imports Python's own module."""
    assert output_of("import platform; print(platform.system())") in {"Linux", "Darwin", "Windows"}


def test_every_room_is_reached_through_graftwork() -> None:
    """Each top folder is a relative link in the package."""
    for room in (*HOUSE, *OTHER_FOLDERS):
        link = ROOT / "src" / "graftwork" / room
        assert link.readlink() == Path("../..") / room


def test_no_module_is_named_like_a_standard_one() -> None:
    """No module has the name of a module of the standard library."""
    assert [str(path) for path in modules(*HOUSE, *OTHER_FOLDERS) if path.stem in sys.stdlib_module_names] == []


def test_rooms_import_downwards_only() -> None:
    """Folders import only those below them, in the order api, sessions, adapters, engine, platform."""
    wrong = []
    for path in modules(*HOUSE):
        below = {*HOUSE[: HOUSE.index(path.parts[0]) + 1]} | ({"demo"} if path.parts[0] == "api" else set())
        for line, name in imports(path):
            parts = name.split(".")
            if parts[0] == "graftwork" and len(parts) > 1 and parts[1] in (*HOUSE, *OTHER_FOLDERS):
                if parts[1] not in below:
                    wrong.append(f"{path}:{line} imports {name}")
            elif parts[0] in HOUSE and parts[0] != "platform":
                wrong.append(f"{path}:{line} imports {name} without graftwork")

    assert wrong == []


def room_of(path: Path) -> str:
    """The room of a module: its folder, or the module itself where the list names it."""
    return str(path) if str(path) in ROOMS else str(path.parent)


def imported_modules(path: Path) -> Iterator[tuple[int, Path]]:
    """The line and the path of each module of the house that a module imports, `TYPE_CHECKING` counted."""
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "graftwork" or len(parts) < 3 or parts[1] not in HOUSE or parts[-2].endswith("_pb2"):
            continue
        candidates = (Path(*parts[1:]).with_suffix(".py"), Path(*parts[1:-1]).with_suffix(".py"))
        found = next((candidate for candidate in candidates if (ROOT / candidate).is_file()), None)
        if found is not None:
            yield line, found


def test_every_module_stands_in_a_listed_room() -> None:
    """Each folder with modules is in the list of rooms, and each listed room exists."""
    found = {room_of(path) for path in modules(*HOUSE)}

    assert found == set(ROOMS)


def test_rooms_import_only_rooms_below_them() -> None:
    """A room imports only itself and rooms below it in the list."""
    floor = {room: index for index, room in enumerate(ROOMS)}
    wrong = [
        f"{path}:{line} imports {target}"
        for path in modules(*HOUSE)
        for line, target in imported_modules(path)
        if floor[room_of(target)] > floor[room_of(path)]
    ]

    assert wrong == []


def test_modules_import_each_other_without_a_circle() -> None:
    """Imports form no circle, type-checking imports included."""
    graph = {path: {target for _, target in imported_modules(path)} for path in modules(*HOUSE)}

    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle

    assert set(order) >= set(graph)


def test_no_room_is_too_large() -> None:
    """A room has at most twenty modules."""
    sizes = Counter(room_of(path) for path in modules(*HOUSE))

    assert {room: size for room, size in sizes.items() if size > MAX_MODULES} == {}


CODE = (*HOUSE, "demo", "benchmarks", "tests")
"""The folders whose files and functions have a length limit. A migration is a list of columns that never changes."""


def is_one_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton compiles the function into one program of a GPU, which keeps its values in registers."""
    return any(ast.unparse(decorator).startswith("triton.") for decorator in function.decorator_list)


def test_no_file_is_too_long() -> None:
    """A file of code has at most 400 lines."""
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in modules(*CODE)}

    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_no_function_is_too_long() -> None:
    """A function has at most 60 lines, unless it is one GPU kernel."""
    wrong = [
        f"{path}:{node.lineno} {node.name}"
        for path in modules(*CODE)
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
        and not is_one_kernel(node)
    ]

    assert wrong == []


def test_the_architecture_page_describes_every_room() -> None:
    """docs/architecture.md has one line for each room, in the order of the list."""
    page = (ROOT / "docs" / "architecture.md").read_text()

    described = re.findall(r"^\| `([a-z_/.]+)` \|", page.split("## 2.")[0], re.MULTILINE)

    assert described == list(ROOMS)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import graftwork.api.server.app", ("torch", "transformers", "triton", "numba", "peft")),
        ("import graftwork; graftwork.Graftwork", ("torch", "fastapi", "sqlalchemy", "transformers", "grpc", "redis")),
        ("import graftwork.engine.scheduler.scheduler", ("torch", "fastapi", "sqlalchemy")),
        ("import graftwork.engine.build.engine", ("numba", "triton", "fastapi", "sqlalchemy")),
        ("import graftwork.api.server.serve", ("torch", "fastapi", "sqlalchemy", "pydantic", "redis")),
        ("import graftwork.api.server.engine_probe", ("torch", "fastapi", "sqlalchemy", "pydantic")),
    ],
)
def test_a_process_loads_only_what_it_needs(statement: str, unwanted: tuple[str, ...]) -> None:
    """The gateway loads no torch, the SDK no server, the scheduler neither, an engine no kernels at first, `serve` no gateway
    before its engine starts, and a probe no database."""
    loaded = output_of(f"import sys; {statement}", f"print([name for name in {unwanted} if name in sys.modules])")

    assert loaded == "[]"
