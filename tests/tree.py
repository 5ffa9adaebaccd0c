"""The modules of the tree, and what they import."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOUSE = ("platform", "engine", "adapters", "sessions", "api")
"""The folders at the root, from the ground up: a folder may import itself and what stands before it."""


def modules(*folders: str) -> Iterator[Path]:
    """Every module of the folders, relative to the root, without what protoc generates."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path.relative_to(ROOT)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the full name of everything that a module imports, wherever in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def allowed(path: Path, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern fits; `folder/*` means everything below the folder."""
    return any(
        path.is_relative_to(pattern.removesuffix("/*")) if pattern.endswith("/*") else path.match(pattern)
        for pattern in patterns
    )
