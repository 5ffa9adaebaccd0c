"""Keeps what an engine has measured at its start, so that the next start need not measure it again.

    CalibrationKey ──► file ──► LoadCost: young, plausible, and confirmed by a short measurement
                        └──► anything else: the engine measures again, and the file is written anew

A file is found by the digest of its key, so a change of the machine, the model, the version or a setting finds none. A
measurement of a noisy moment is not kept for ever: a file is too old after `MOST_AGE_S`, and the engine compares it
with one prefill at each start (`calibration.confirms`).
Owns the files. Never measures.
"""

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import graftwork
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.index.cost_model import LoadCost, PrefillCost, TransferCost
from graftwork.platform.clock import Clock

_log = logging.getLogger(__name__)

MOST_AGE_S = 7 * 86400.0
"""The age, in seconds, from which a measurement is not used any more."""
_FORMAT = 1
_MOST_COST_S = 1e6
"""The cost of a tier that is not there. No measured cost is larger."""
_MOST_PREFILL_TOKEN_S = 60.0
_NOT_MEASURED = frozenset({"model", "model_name", "calibration_folder", "renew_calibration"})
"""The settings that no measurement depends on. The model counts by its fingerprint."""


@dataclass(frozen=True, slots=True)
class CalibrationKey:
    """What a measurement depends on, as JSON."""

    values: Mapping[str, str]

    @classmethod
    def of(cls, config: EngineConfig, fingerprint: str, device: torch.device, dtype: torch.dtype) -> "CalibrationKey":
        settings = {field.name: str(getattr(config, field.name)) for field in fields(config)}
        machine = {
            "machine": platform.node(),
            "processor": _processor(),
            "cores": str(os.cpu_count()),
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "version": graftwork.__version__,
            "fingerprint": fingerprint,
            "used_dtype": str(dtype),
        }
        return cls({name: value for name, value in settings.items() if name not in _NOT_MEASURED} | machine)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:32]


class CalibrationCache:
    """The file with the measurements of one engine."""

    def __init__(self, folder: Path | None, key: CalibrationKey, clock: Clock) -> None:
        """Without a folder, nothing is kept."""
        self._folder = folder
        self._key = key
        self._clock = clock

    def load(self) -> LoadCost | None:
        """Returns the measurements of an earlier start; None if there are none that can be used.

        Logs a warning for a file that is damaged, or of a time that cannot be.
        """
        if self._folder is None:
            return None
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            age_s = self._clock.now() - stored["measured_at"]
            if age_s > MOST_AGE_S:
                _log.info("calibration_too_old", extra={"path": str(self._path), "age_s": round(age_s)})
                return None
            return _checked(stored, self._key, age_s)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("calibration_ignored", extra={"path": str(self._path), "reason": str(error)})
            return None

    def store(self, cost: LoadCost) -> None:
        """Writes measurements of this moment, and removes files that are too old. Logs a warning if it cannot."""
        if self._folder is None:
            return
        body = {
            "format": _FORMAT,
            "measured_at": self._clock.now(),
            "key": dict(self._key.values),
            "cost": {"host": astuple(cost.host), "disk": astuple(cost.disk), "prefill": astuple(cost.prefill)},
        }
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(body, indent=1), encoding="utf-8")
            unfinished.replace(self._path)
            self._remove_old(self._folder)
        except OSError as error:
            _log.warning("calibration_not_kept", extra={"path": str(self._path), "reason": str(error)})

    def _remove_old(self, folder: Path) -> None:
        for path in folder.glob("costs-*"):
            with suppress(FileNotFoundError):  # another engine may remove it, too
                if self._clock.now() - path.stat().st_mtime > MOST_AGE_S:
                    path.unlink()

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / f"costs-{self._key.digest}.json"


def _checked(stored: Any, key: CalibrationKey, age_s: float) -> LoadCost:
    """Returns the costs of a file. Raises ValueError, TypeError or KeyError if they cannot be measured ones."""
    if stored["format"] != _FORMAT or stored["key"] != dict(key.values):
        raise ValueError("it is of another format or another engine")
    if not age_s >= 0.0:
        raise ValueError("it is of the future")
    found = stored["cost"]
    cost = LoadCost(TransferCost(*found["host"]), TransferCost(*found["disk"]), PrefillCost(*found["prefill"]))
    seconds = [*astuple(cost.host), *astuple(cost.disk), *astuple(cost.prefill)]
    if not all(isinstance(one, float | int) and math.isfinite(one) and 0.0 <= one <= _MOST_COST_S for one in seconds):
        raise ValueError("its costs are no times")
    if not 0.0 < cost.prefill.token_s <= _MOST_PREFILL_TOKEN_S:
        raise ValueError("its time for a token cannot be")
    return cost


def _processor() -> str:
    """Returns the name of the processor, or the kind of machine if the system does not tell it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
