"""Tests of measurements that are kept from one start of an engine to the next."""

import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graftwork.engine.build.calibration import confirms
from graftwork.engine.build.calibration_cache import MOST_AGE_S, CalibrationCache, CalibrationKey
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.kv.index.cost_model import LoadCost, PrefillCost, TransferCost
from graftwork.engine.scheduler.validation import SchedulerLimits
from graftwork.platform.clock import ManualClock
from tests.engine.conftest import RandomModels

COST = LoadCost(TransferCost(1e-4, 2e-5), TransferCost(1e6, 1e6), PrefillCost(1e-3, 1e-7, 2e-3))
CPU = torch.device("cpu")
FINGERPRINT = "sha256:" + "1" * 64


def key_of(**changes: Any) -> CalibrationKey:
    config = replace(EngineConfig(model=Path("model")), **changes)
    return CalibrationKey.of(config, FINGERPRINT, CPU, torch.float32)


@pytest.fixture
def cache(tmp_path: Path, manual_clock: ManualClock) -> CalibrationCache:
    return CalibrationCache(tmp_path / "calibration", key_of(), manual_clock)


def the_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "calibration").iterdir()
    return path


def test_what_was_measured_is_found_again(cache: CalibrationCache, tmp_path: Path, manual_clock: ManualClock) -> None:
    """Costs come back as they were, also in another process, and whatever folder the model lies in."""
    assert cache.load() is None
    cache.store(COST)

    again = CalibrationCache(tmp_path / "calibration", key_of(model=Path("elsewhere")), manual_clock)

    assert cache.load() == again.load() == COST


@pytest.mark.parametrize("changes", [{"threads": 2}, {"page_tokens": 32}, {"host_kv_bytes": 0}, {"kernels": "torch"}])
def test_another_setting_finds_nothing(
    cache: CalibrationCache, tmp_path: Path, manual_clock: ManualClock, changes: dict[str, Any]
) -> None:
    """An engine with another setting measures for itself."""
    cache.store(COST)

    assert CalibrationCache(tmp_path / "calibration", key_of(**changes), manual_clock).load() is None


def test_another_machine_model_or_dtype_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key names the machine, the content of the model, the dtype and the version."""
    config = EngineConfig(model=Path("model"))
    keys = [
        CalibrationKey.of(config, FINGERPRINT, CPU, torch.float32),
        CalibrationKey.of(config, "sha256:" + "2" * 64, CPU, torch.float32),
        CalibrationKey.of(config, FINGERPRINT, CPU, torch.bfloat16),
    ]
    monkeypatch.setattr("platform.node", lambda: "another")
    keys.append(CalibrationKey.of(config, FINGERPRINT, CPU, torch.float32))
    monkeypatch.setattr("graftwork.__version__", "0.0.0")
    keys.append(CalibrationKey.of(config, FINGERPRINT, CPU, torch.float32))

    assert len({key.digest for key in keys}) == 5


def test_measurements_expire(cache: CalibrationCache, manual_clock: ManualClock) -> None:
    """A measurement that was made in a noisy moment is not used for ever."""
    cache.store(COST)

    manual_clock.advance(MOST_AGE_S)
    assert cache.load() == COST
    manual_clock.advance(1)
    assert cache.load() is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: "{",
        lambda body: "[]",
        lambda body: json.dumps(body | {"format": 0}),
        lambda body: json.dumps(body | {"key": {}}),
        lambda body: json.dumps(body | {"measured_at": body["measured_at"] + 10}),
        lambda body: json.dumps(body | {"measured_at": "yesterday"}),
        lambda body: json.dumps(body | {"cost": {}}),
        lambda body: json.dumps(body | {"cost": body["cost"] | {"host": [1e-4]}}),
        lambda body: json.dumps(body | {"cost": body["cost"] | {"host": [-1.0, 0.1]}}),
        lambda body: json.dumps(body | {"cost": body["cost"] | {"host": ["x", 0.1]}}),
        lambda body: json.dumps(body | {"cost": body["cost"] | {"disk": [float("nan"), 0.1]}}),
        lambda body: json.dumps(body | {"cost": body["cost"] | {"prefill": [0.0, 0.0, 0.0]}}),
        lambda body: json.dumps(body | {"cost": body["cost"] | {"prefill": [61.0, 0.0, 0.0]}}),
    ],
)
def test_a_damaged_file_is_ignored_with_one_warning(
    cache: CalibrationCache, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Any], str]
) -> None:
    """A file that is no record of this engine, or whose costs cannot be, is ignored, and the next one replaces it."""
    cache.store(COST)
    path = the_file(tmp_path)
    path.write_text(damage(json.loads(path.read_text())))

    with caplog.at_level(logging.WARNING):
        found = cache.load()

    assert found is None
    assert [record.message for record in caplog.records] == ["calibration_ignored"]
    cache.store(COST)
    assert cache.load() == COST


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, manual_clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose calibration folder is a file starts, and measures at each start."""
    (tmp_path / "file").write_text("")
    cache = CalibrationCache(tmp_path / "file", key_of(), manual_clock)

    with caplog.at_level(logging.WARNING):
        cache.store(COST)

    assert [record.message for record in caplog.records] == ["calibration_not_kept"]
    assert cache.load() is None


@pytest.mark.parametrize(
    ("factors", "num_runs", "expected"),
    [
        ((0.2, 0.2), 2, False),
        ((0.5,), 1, True),
        ((1.0,), 1, True),
        ((2.0,), 1, True),
        ((5.0, 1.0), 2, True),
        ((5.0, 5.0), 2, False),
    ],
)
def test_kept_costs_must_be_about_right(
    monkeypatch: pytest.MonkeyPatch, factors: tuple[float, ...], num_runs: int, expected: bool
) -> None:
    """Costs are confirmed by a prefill that takes a third to three times as long as they say. The first may be slow."""
    limits = SchedulerLimits(16, 512, 4, 16, 1024, 10, frozenset())
    now, runs = [0.0], list[StepPlan]()
    monkeypatch.setattr("graftwork.engine.build.calibration.perf_counter", lambda: now[0])

    def run(plan: StepPlan) -> StepResult:
        num_tokens = sum(piece.num_tokens for piece in plan.slices)
        now[0] += factors[len(runs)] * COST.prefill.seconds(num_tokens, 0)
        runs.append(plan)
        return StepResult({})

    assert confirms(COST.prefill, run, limits) is expected
    assert len(runs) == num_runs


def test_the_second_start_measures_no_loads(
    models: RandomModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes the costs of its first start, measures them anew if they are far off, and if it is told to.

    All that is measured takes 10 ms by the clock, however busy the machine is.
    """
    ticks = itertools.count()
    monkeypatch.setattr("graftwork.engine.build.calibration.perf_counter", lambda: next(ticks) / 100)
    config = EngineConfig(
        model=models.base, dtype="float32", device_bytes=4 * 2**20, calibration_folder=tmp_path / "calibration"
    )

    def start(**changes: Any) -> str:
        build_engine(replace(config, **changes), lambda _: models.source)
        return the_file(tmp_path).read_text()

    first = start()
    assert start() == first

    body = json.loads(first)
    body["cost"]["prefill"] = [1.0, 0.0, 1.0]
    the_file(tmp_path).write_text(json.dumps(body))
    measured = start()

    assert json.loads(measured)["cost"]["prefill"][0] < 0.5
    assert start(renew_calibration=True) != measured
