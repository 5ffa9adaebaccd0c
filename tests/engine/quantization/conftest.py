"""Quantised checkpoints, each written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.quantization.checkpoints import FORMS, Checkpoint, make_plain, write


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model whose sizes are whole groups."""
    return make_plain(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def checkpoint_of(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Returns the checkpoint of a form by its name."""
    made: dict[str, Checkpoint] = {}

    def checkpoint(name: str) -> Checkpoint:
        if name not in made:
            made[name] = write(FORMS[name], plain, tmp_path_factory.mktemp("form"))
        return made[name]

    return checkpoint
