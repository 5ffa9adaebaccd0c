"""Declares which rows and files of adapters are in an export: all of them, also of what is deleted and not yet erased."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from graftwork.adapters.registry.artifact_store import CONFIG_NAME, WEIGHTS_NAME, ArtifactStore
from graftwork.adapters.registry.tables import (
    AdapterAliasRow,
    AdapterRow,
    AdapterTagRow,
    AdapterVersionRow,
    AliasChangeRow,
    RolloutFiguresRow,
    RolloutRow,
)
from graftwork.platform.errors import NotFound
from graftwork.platform.exports.exporter import Content, ContentsOf
from graftwork.platform.exports.sections import Row, Section

_VERSIONS = Section("adapters/versions", AdapterVersionRow)
_ROLLOUTS = Section(
    "adapters/rollouts",
    RolloutRow,
    withheld={"lease_owner": "names a process of the server, and nothing of the tenant"},
)
ADAPTER_SECTIONS = (
    Section("adapters/adapters", AdapterRow),
    _VERSIONS,
    Section("adapters/tags", AdapterTagRow),
    Section("adapters/aliases", AdapterAliasRow),
    Section("adapters/alias_changes", AliasChangeRow),
    _ROLLOUTS,
    Section(
        "adapters/rollout_figures",
        RolloutFiguresRow,
        owner=None,
        parent=_ROLLOUTS,
        parent_column="rollout_id",
        withheld={"gateway_id": "names a process of the server, and nothing of the tenant"},
    ),
)


def adapter_files(artifacts: ArtifactStore) -> ContentsOf:
    """Returns the two files of each adapter version, under its digest. Versions with equal files have them once."""

    def contents(row: Row) -> Iterator[Content]:
        digest = str(row["digest"])
        folder = f"adapters/{digest.removeprefix('sha256:')}"
        yield Content(f"{folder}/{CONFIG_NAME}", partial(asyncio.to_thread, _open_config, artifacts, digest))
        weights = partial(asyncio.to_thread, _open_weights, artifacts, digest)
        yield Content(f"{folder}/{WEIGHTS_NAME}", weights, compress=False)

    return ContentsOf(_VERSIONS, contents)


def _open_config(artifacts: ArtifactStore, digest: str) -> BinaryIO:
    return _opened(artifacts.open(digest).config)


def _open_weights(artifacts: ArtifactStore, digest: str) -> BinaryIO:
    return _opened(artifacts.open(digest).weights)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:  # it was deleted since its path was found
        raise NotFound(f"There is no file {path.name!r} of this adapter.", code="artifact_not_found") from None
