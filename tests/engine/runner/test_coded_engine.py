"""Tests of engines whose interpreted kernels read and write KV in bytes, against engines of the same KV in torch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from graftwork.engine.core.session_commands import SessionVerb
from tests.engine.engine_driver import EngineDriver
from tests.engine.kv.test_quantised_kv import turn
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import engine_of
from tests.engine.random_models import make_base

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]


BOTH = pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
FIRST, SECOND = [5 + n for n in range(10)], [9, 8, 7]
"""Prompts that end within a page of four tokens."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("coded") / "base", num_layers=1)


def engine(base: Path, kernels: str, **options: Any) -> EngineDriver:
    of_kernels = {"row_kernels": kernels, "attention_backend": kernels, "lora_kernels": "torch"}
    return engine_of(base, CountingAdapterSource({}), **of_kernels, **options)


@BOTH
def test_every_tier_and_a_restart_give_the_tokens_of_torch(base: Path, tmp_path: Path, kv_dtype: str) -> None:
    """The second turn has torch's tokens with KV that the kernels have written, from the device, the host and the disk."""
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "disk_kv_bytes": 2**22, "kv_folder": tmp_path}
    driver = engine(base, "triton", **options)
    history = FIRST + turn(driver, FIRST, max_tokens=3)

    warm = turn(driver, history + SECOND, known=len(history), max_tokens=3)
    head = history + SECOND + warm
    driver.command(SessionVerb.SUSPEND, "s", head)
    suspended = driver.command(SessionVerb.READ, "s", head)
    from_host = turn(driver, history + SECOND, known=len(history), max_tokens=3)
    driver.close()
    restarted = engine(base, "triton", **options)
    from_disk = turn(restarted, history + SECOND, known=len(history), max_tokens=3)
    restarted.close()

    plain = engine(base, "torch", kv_dtype=kv_dtype)
    assert suspended.device_tokens == 0
    assert FIRST + turn(plain, FIRST, max_tokens=3) == history
    assert warm == from_host == from_disk == turn(plain, history + SECOND, known=len(history), max_tokens=3)


@BOTH
def test_forks_rewinds_and_drafts_have_the_tokens_of_torch(base: Path, kv_dtype: str) -> None:
    """A fork shares the pages of its parent but the last, a rewound session begins within a page, and drafts are verified over
    codes: all have the tokens that torch gives on engines without any of it."""
    driver = engine(base, "triton", kv_dtype=kv_dtype)
    repeated = FIRST[:6] + FIRST[:6]
    history = repeated + turn(driver, repeated, max_tokens=6)

    forked = turn(driver, history + SECOND, session="child", known=len(history), max_tokens=2)
    straight = turn(driver, history + SECOND, known=len(history), max_tokens=2)
    rewound = turn(driver, history[:14] + SECOND, known=14, max_tokens=2)

    plain = engine(base, "torch", kv_dtype=kv_dtype, max_draft_tokens=0)
    assert driver.loop.stats().drafted_tokens > 0
    assert repeated + turn(plain, repeated, max_tokens=6) == history
    assert forked == straight == turn(plain, history + SECOND, session="other", max_tokens=2)
    assert rewound == turn(plain, history[:14] + SECOND, session="another", max_tokens=2)
