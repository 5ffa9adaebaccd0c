"""Tests of the account of an engine's memory, each with an engine in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import RandomModels

MIB = 2**20
PROGRAM = """
import json, random, sys
from pathlib import Path
import psutil
from safetensors.torch import load_file
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from tests.engine.engine_driver import EngineDriver
from tests.engine.random_models import FolderSource
from tests.engine.tagged_kv_cache import load_always

def report(**facts):
    stats = engine.memory.complete(driver.loop.stats())
    rss = psutil.Process().memory_info().rss
    owners = {name: getattr(stats, name) for name in stats.__dataclass_fields__ if name.startswith("memory_")}
    print(json.dumps({"rss": rss, "owners": owners, "copies": stats.adapter_copy_bytes, **facts}), flush=True)

def load(times):
    for number in range(times):
        prompt = [draw.randrange(2, 97) for _ in range(200)]
        driver.run(prompt, max_tokens=2)
        driver.command(SessionVerb.HOLD, f"s{number}", prompt)

draw = random.Random(7)
folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
source = FolderSource({"sha256:wide": Path(sys.argv[3])}, {"sha256:wide": 2.0})
config = EngineConfig(model=folder, dtype="float32", page_tokens=16, **options)
engine = build_engine(config, lambda _: source, costs=load_always())
driver = EngineDriver(engine)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell which pages are resident")


def reports(models: RandomModels, options: dict[str, int], *lines: str) -> list[dict[str, Any]]:
    """What the program printed."""
    adapter = models.source.folders["sha256:wide"]
    program = "\n".join([PROGRAM, *lines])
    command = [sys.executable, "-c", program, str(models.base), json.dumps(options), str(adapter)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_owners_account_for_the_whole_process(models: RandomModels) -> None:
    """The owners' bytes add up to the resident memory that psutil reads, before and after requests."""
    sizes = {"device_bytes": 64 * MIB, "host_kv_bytes": 64 * MIB}

    begun, loaded = reports(models, sizes, "report()", "load(20)", "report()")

    for one in (begun, loaded):
        assert sum(one["owners"].values()) == pytest.approx(one["rss"], rel=0.02)
    assert loaded["owners"]["memory_drafts"] > 0


def test_each_owner_has_what_it_was_given(models: RandomModels) -> None:
    """Weights have the bytes of the checkpoint, an adapter those of its file twice (host and device), and KV what its
    tokens need, with the 16 MiB that are made ready ahead of them."""
    sizes = {"device_bytes": 256 * MIB, "host_kv_bytes": 256 * MIB}
    facts = "weights=sum(t.nbytes for t in load_file(folder / 'model.safetensors').values())"
    adapter = (
        "adapter=sum(t.nbytes for t in load_file(source.folders['sha256:wide'] / 'adapter_model.safetensors').values())"
    )
    run = "driver.run([draw.randrange(2, 97) for _ in range(200)], adapter='sha256:wide', max_tokens=2)"

    begun, one, many = reports(models, sizes, f"report({facts})", run, f"report({adapter})", "load(160)", "report()")

    assert begun["owners"]["memory_weights"] == begun["weights"]
    assert begun["owners"]["memory_adapters"] == 0
    assert one["owners"]["memory_adapters"] - one["copies"] == pytest.approx(2 * one["adapter"], rel=0.5)
    page_bytes = 2 * 2 * 16 * 2 * 8 * 4  # K and V, layers, tokens, heads, head size, fp32
    used = 160 * (200 // 16) * page_bytes
    for tier in ("memory_device_kv", "memory_host_kv"):
        padding = 2 * MIB  # the huge page that holds the frame of padding
        assert begun["owners"][tier] <= 16 * MIB + padding + 2 * MIB
        assert used <= many["owners"][tier] <= used * 1.2 + 16 * MIB + padding + 2 * MIB


def test_full_caches_do_not_grow(models: RandomModels) -> None:
    """Once the device and the host are full, another hundred requests add less than four MiB to the process, and
    KV has at most the bytes that it was given."""
    sizes = {"device_bytes": 4 * MIB, "host_kv_bytes": 4 * MIB, "draft_cache_bytes": MIB // 4}

    full, later = reports(models, sizes, "load(60)", "report()", "load(100)", "report()")

    assert later["rss"] - full["rss"] < 4 * MIB
    assert later["owners"]["memory_device_kv"] <= 4 * MIB + 2 * 8192
    assert 3 * MIB < later["owners"]["memory_host_kv"] <= 4 * MIB + 8192
    assert later["owners"]["memory_other"] - full["owners"]["memory_other"] < 4 * MIB
