"""Tests of what may be used where: heavy packages, environment variables, private names and clocks."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tree import HOUSE, ROOT, allowed, imports, modules

FENCES: dict[str, tuple[str, ...]] = {
    "torch": ("engine/*", "adapters/registry/weights.py"),
    **dict.fromkeys(
        ("numba", "llvmlite"),
        ("engine/lora/cpu_kernel.py", "engine/quantization/cpu_kernel.py", "engine/recurrence/cpu_kernel.py"),
    ),
    **dict.fromkeys(("triton", "xgrammar"), ("engine/*",)),
    "sqlalchemy": (
        "*/tables.py",
        "*/repository.py",
        "adapters/registry/*_rows.py",
        "platform/ledger/*_rows.py",
        "platform/ledger/upkeep/*_rows.py",
        "platform/tenancy/*_rows.py",
        "platform/batches/*_rows.py",
        "platform/database*.py",
        "platform/sqlite.py",
        "sessions/store/*",
        "sessions/responses/store.py",
    ),
    "alembic": ("platform/database.py",),
    "redis": ("platform/*", "sessions/core/lease.py"),
    "jwt": ("platform/oidc/*",),
    "cryptography": ("platform/oidc/*", "platform/encryption/*"),
    **dict.fromkeys(("fastapi", "starlette"), ("api/*",)),
    "grpc": ("engine/rpc/*",),
    "ray": ("api/ray/actors.py",),
    "huggingface_hub": ("api/server/model_sources.py",),
    "obstore": (
        "adapters/registry/bucket_artifacts.py",
        "adapters/sources/bucket_reader.py",
        "api/server/model_sources.py",
        "engine/kv/disk/bucket.py",
        "platform/outbound/buckets.py",
    ),
    "prometheus_client": ("platform/*",),
    "opentelemetry": ("platform/tracing/*",),
    **dict.fromkeys(("transformers", "peft", "pickle", "shelve", "multiprocessing"), ()),
    "marshal": ("platform/worker_pool.py",),
}
"""By package: the only places in the rooms that may import it."""
CLOCK_READERS = (
    "tests/api/server/test_serve.py",  # slow
    "tests/chaos/*",  # slow
    "tests/clients/test_s3_server.py",  # waits for a process
    "tests/end_to_end/*",  # waits for processes
    "tests/engine/grammar/schema/test_lint.py",  # a slow test of it
    "tests/engine/kv/test_isolation.py",  # a slow test of it
    "tests/sessions/text/test_chat_template.py",  # the time zone alone
)
"""The tests that may import `time`: in the fast suite no assertion depends on how fast the machine is."""
FOREIGN_PRIVATES = {
    "_request_id": "of an answer in OpenAI's and Anthropic's SDKs, whose documents name it",
    **dict.fromkeys(("_patch_lang", "_get_np_dtype"), "of Triton's interpreter, which has nothing public"),
    **dict.fromkeys(("_get_local_constants", "_local_constants"), "of Hypothesis, without a setting for what it does"),
}
ENVIRONMENT_READERS = ("platform/settings/settings.py", "platform/environment.py", "api/sdk/*", "api/cli/*")


@pytest.mark.parametrize("package", FENCES)
def test_a_package_stays_behind_its_fence(package: str) -> None:
    """A heavy package is imported only in the modules that own it."""
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules(*HOUSE)
        if not allowed(path, FENCES[package])
        for line, name in imports(path)
        if name.split(".")[0] == package
    ]

    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    """Only `Settings` and the client programs read environment variables."""
    wrong = []
    for path in modules(*HOUSE):
        if allowed(path, ENVIRONMENT_READERS):
            continue
        wrong += [
            f"{path}:{node.lineno} reads os.{node.attr}"
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
        ]
        wrong += [
            f"{path}:{line} imports {name}" for line, name in imports(path) if name in ("os.environ", "os.getenv")
        ]

    assert wrong == []


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the name of each private member that a module uses of an object or a module that is not its own."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr") | ast.Name(id="getattr" | "setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names = [name]
            case _:
                continue
        yield from ((node.lineno, name) for name in names if name.startswith("_") and not name.endswith("__"))


def test_tests_use_what_is_public() -> None:
    """Tests use no private name of another module."""
    wrong = [
        f"{path}:{line} uses {name}"
        for path in modules("tests")
        for line, name in private_names(path)
        if name not in FOREIGN_PRIVATES
    ]

    assert wrong == []


def test_tests_count_work_instead_of_time() -> None:
    """No fast test asserts a time."""
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules("tests")
        if not allowed(path, CLOCK_READERS)
        for line, name in imports(path)
        if name.split(".")[0] in ("time", "timeit")
    ]

    assert wrong == []
