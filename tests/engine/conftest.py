"""Random models and engines over them, made once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from tests.engine.engine_driver import EngineDriver
from tests.engine.parallel.rank_threads import start_thread
from tests.engine.random_models import FolderSource, make_adapter, make_base, reference_model
from tests.engine.tagged_kv_cache import load_always


@dataclass(frozen=True)
class RandomModels:
    """A base model, three different adapters, and the reference model of each."""

    base: Path
    source: FolderSource
    references: dict[str | None, torch.nn.Module]

    def engine(self, **options: Any) -> EngineDriver:
        """A fresh engine in fp32 over the base model."""
        settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20} | options
        return EngineDriver(
            build_engine(
                EngineConfig(model=self.base, **settings),
                lambda _: self.source,
                costs=load_always(),
                start_worker=start_thread,
            )
        )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> RandomModels:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    base = make_base(root / "base")
    options: dict[str, dict[str, Any]] = {
        "sha256:wide": {"r": 8, "lora_alpha": 16},
        "sha256:narrow": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "sha256:rooted": {"r": 4, "lora_alpha": 6, "use_rslora": True, "layers_to_transform": [1]},
    }
    folders = {
        digest: make_adapter(base, root / digest[7:], seed=seed, **settings)
        for seed, (digest, settings) in enumerate(options.items(), start=1)
    }
    scales = {"sha256:wide": 2.0, "sha256:narrow": 5 / 3, "sha256:rooted": 6 / 2}
    references: dict[str | None, torch.nn.Module] = {None: reference_model(base, None)}
    references |= {digest: reference_model(base, folder) for digest, folder in folders.items()}
    return RandomModels(base, FolderSource(folders, scales), references)


@pytest.fixture
def make_engine(models: RandomModels) -> Callable[..., EngineDriver]:
    return models.engine
