"""The whole engine over the kernels, under the interpreter: what torch does with the same requests, it does too."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.adapter_weights import AdapterWeights, LoraPair
from graftwork.engine.assembly import build_engine
from graftwork.engine.config import EngineConfig
from graftwork.engine.request import AdapterUse
from tests.engine.harness import Harness
from tests.engine.kv_lab import LOAD_ALL
from tests.engine.random_models import make_base
from tests.engine.test_decoder_parity import RecordingRunner, random_prompt
from tests.engine.test_lora_lifecycle import SHAPES, Shelf, random_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("kernels") / "base")


def engine(base: Path, shelf: Shelf, kernels: str, **options: Any) -> Harness:
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_kv_bytes": 4 * 2**20} | options
    config = EngineConfig(model=base, lora_kernels=kernels, **settings)
    return Harness(build_engine(config, lambda _: shelf, costs=LOAD_ALL))


def test_x(base: Path) -> None:
    import time
    shelf = Shelf({"a": random_adapter("a", 8, 1), "b": random_adapter("b", 3, 2), "c": random_adapter("c", 24, 3)})
    seen = {}
    for kernels in ("torch", "triton"):
        t = time.time()
        harness = engine(base, shelf, kernels, max_batch_tokens=11)
        harness.warm("a", "b", "c")
        recorder = RecordingRunner(harness)
        harness.loop._runner = recorder
        random = Random(3)
        made = [
            harness.submit(random_prompt(random, n), adapters=uses, max_tokens=3, ignore_eos=True)
            for n, uses in [(9, ()), (14, (AdapterUse("a"),)), (3, (AdapterUse("b"),)), (2, (AdapterUse("a", 0.5), AdapterUse("c", -1.5))), (5, (AdapterUse("c"),))]
        ]
        harness.finish()
        seen[kernels] = [o.token_ids for o in made], torch.stack([row for _, row in recorder.rows])
        print(kernels, time.time() - t)
    assert seen["torch"][0] == seen["triton"][0]
    print((seen["torch"][1] - seen["triton"][1]).abs().max())
