"""A random base with layers enough for three taps, adapters, and heads of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import RandomModels
from tests.engine.draft_head.eagle3 import make_head
from tests.engine.random_models import FolderSource, make_adapter, make_base, reference_model

LAYERS = 7


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    root = tmp_path_factory.mktemp("deep")
    base = make_base(root / "base", seed=4, num_layers=LAYERS)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 8}
    folders = {"sha256:deep": make_adapter(base, root / "adapter", seed=8, **options)}
    references = {None: reference_model(base, None), "sha256:deep": reference_model(base, folders["sha256:deep"])}
    return RandomModels(base, FolderSource(folders, {"sha256:deep": 2.0}), references)


@pytest.fixture(scope="session")
def head(deep: RandomModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("heads") / "whole", deep.base)


@pytest.fixture(scope="session")
def small_head(deep: RandomModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that guesses 40 of the tokens, and reads other layers."""
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, LAYERS - 1], "use_aux_hidden_state": True}}
    return make_head(tmp_path_factory.mktemp("heads") / "small", deep.base, seed=6, draft_vocab=40, **layers)
