"""Checks this machine for `graftwork doctor`: Python, libraries, clock, device, kernels, model, data folder, disk.

Each check returns what it found, or raises Amiss with what to do.
"""

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import graftwork
from graftwork.api.cli.doctor.findings import Amiss, warning
from graftwork.platform.settings.settings import Settings
from graftwork.platform.settings.values import ModelReference

if TYPE_CHECKING:
    from graftwork.engine.kernels.machine_report import MachineReport

_LEAST_BYTES, _GOOD_BYTES = 512 * 2**20, 5 * 2**30
_EARLIEST_YEAR = 2026
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?([^;]*)(?:;\s*(.*))?")
_SHOWN = ("torch", "numpy", "fastapi", "httpx", "pydantic")


def check_python() -> str:
    return f"Python {platform.python_version()} at {sys.executable}, Graftwork {graftwork.__version__}"


def check_libraries(requirements: Iterable[str] | None = None) -> str:
    """Checks that no installed library is older than Graftwork's least version. `requirements` replaces Graftwork's own
    list in tests.
    """
    try:
        declared = [*(metadata.requires("graftwork") or ())] if requirements is None else [*requirements]
    except metadata.PackageNotFoundError:
        declared = []
    old = [found for line in declared if (found := _too_old(line)) is not None]
    if old:
        raise Amiss(", ".join(old), "Run pip install --upgrade 'graftwork[server]', or install these versions.")
    shown = [f"{name} {metadata.version(name)}" for name in _SHOWN if find_spec(name) is not None]
    if find_spec("torch") is None:
        raise warning(", ".join(shown), "This is a client, or a gateway alone; engines need 'graftwork[server]'.")
    return ", ".join(shown)


def _too_old(line: str) -> str | None:
    """Returns what is wrong with an installed library of one requirement. None if it is new enough or not installed."""
    matched = _REQUIREMENT.match(line)
    least = None if matched is None else re.search(r">=\s*([0-9.]+)", matched[2])
    if matched is None or least is None:
        return None
    try:
        installed = metadata.version(matched[1])
    except metadata.PackageNotFoundError:
        return None  # of an extra
    return f"{matched[1]} {installed} is older than {least[1]}" if _parts(installed) < _parts(least[1]) else None


def _parts(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9.]+", version)
    return tuple(int(part) for part in found[0].strip(".").split(".")) if found else ()


def check_clock(now: float | None = None) -> str:
    """`now` replaces the machine's time in tests, in unix seconds."""
    moment = time.gmtime(now)
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", moment)
    if moment.tm_year < _EARLIEST_YEAR:
        raise Amiss(
            f"the clock says {shown}", "Set the clock: keys would expire at the wrong time (chronyd, timedatectl)."
        )
    return shown


def check_device(settings: Settings, report: "MachineReport | None" = None) -> str:
    """`report` replaces what torch sees in tests."""
    seen = report or _report()
    if settings.device.startswith("cuda") and not seen.num_gpus:
        raise Amiss(
            f"device is {settings.device}, and torch {seen.torch_version} sees no GPU",
            "Install the driver (nvidia-smi must work) and a torch for CUDA, or set device to auto.",
        )
    if settings.device == "cpu" or not seen.num_gpus:
        return f"CPU with {os.cpu_count()} cores, torch {seen.torch_version}, threads {settings.threads}"
    if settings.tensor_parallel > seen.num_gpus:
        raise Amiss(f"tensor_parallel is {settings.tensor_parallel}, and there are {seen.num_gpus} GPUs", "Lower it.")
    return f"{seen.num_gpus} × {seen.gpu_name} with {seen.gpu_bytes / 2**30:.0f} GiB, torch {seen.torch_version}"


def check_kernels(settings: Settings, report: "MachineReport | None" = None) -> str:
    """`report` replaces what torch sees in tests."""
    on_gpu = settings.device != "cpu" and (report or _report()).num_gpus > 0
    wanted, module = ("Triton", "triton") if on_gpu else ("numba", "numba")
    if settings.kernels == "torch":
        raise warning("kernels is torch: no compiled kernels", "Leave `kernels` out, unless you compare.")
    if find_spec(module) is None:
        advice = f"Install {'graftwork[kernels]' if on_gpu else 'graftwork[server]'}; torch does the same, slower."
        raise warning(f"{wanted} is not installed", advice)
    return f"{wanted} {metadata.version(module)} compiles the kernels; the engine tests them at its start"


def _report() -> "MachineReport":
    from graftwork.engine.kernels.machine_report import machine_report

    return machine_report()


def check_model(settings: Settings) -> str:
    from graftwork.api.server.served_model import model_folder

    if settings.model is None and not settings.demo:
        raise warning("no model is set", "Give --model FOLDER, or --demo for the one that is shipped.")
    if isinstance(settings.model, ModelReference):
        return f"{settings.model} is fetched when the server starts"
    folder = model_folder(settings)
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    weights = [*folder.glob("*.safetensors")]
    if missing or not weights:
        absent = ", ".join([*missing, *([] if weights else ["*.safetensors"])])
        raise Amiss(f"{folder} lacks {absent}", "Download the whole model, as safetensors with its tokenizer.json.")
    return f"{folder}: {sum(path.stat().st_size for path in weights) / 2**20:.0f} MiB of weights"


def check_data_folder(settings: Settings) -> str:
    folder = settings.data_dir
    if not folder.exists():
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            raise Amiss(f"{folder} cannot be made in {parent}", "Choose another with --data-dir, or change its owner.")
        return f"{folder} will be made at the first start"
    if not os.access(folder, os.W_OK | os.X_OK | os.R_OK):
        raise Amiss(f"{folder} is not writable by this user", "Run chown for it, or choose another with --data-dir.")
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise warning(f"others can look into {folder} (mode {mode:o}), which holds keys", f"Run chmod 700 {folder}.")
    return f"{folder.absolute()}, mode {mode:o}"


def check_disk(settings: Settings, free_bytes: int | None = None) -> str:
    """`free_bytes` replaces the free space of the data folder in tests."""
    folder = next(path for path in (settings.data_dir, *settings.data_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    wanted = settings.disk_kv_bytes if settings.disk_kv_bytes is not None else 2 * 2**30
    shown = f"{free / 2**30:.1f} GiB free at {_short(folder)}"
    if free < _LEAST_BYTES:
        raise Amiss(shown, "Make room: the database, adapters and cached KV lie there.")
    if free < max(wanted, _GOOD_BYTES):
        advice = f"KV files may take {wanted / 2**30:.1f} GiB (disk_kv_bytes), and adapters and the database more."
        raise warning(shown, advice)
    return shown


def _short(folder: Path) -> str:
    return str(folder.absolute())
