"""Builds what differs between an engine of one rank and one of several (tensor parallelism).

An engine passes each part in which other ranks take part through its EngineRanks. SingleRank returns the parts as they
are. LeadingRank is rank 0 of several: it starts the workers, and returns parts that repeat their work on all ranks.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from graftwork.engine.build.kv import KvStorage, check_sizes, frame_sizer
from graftwork.engine.build.runner import RunnerParts
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.index.page_store import DiskPages, NoDisk
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.plan import CopyEngine, Report
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.fuse import BaseModules
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.messages import DeviceFailed, Message
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.weight_reader import TensorSource, WeightReader
from graftwork.engine.model.weights import DecoderWeights, open_weights
from graftwork.engine.parallel.adapters import AdapterDivider
from graftwork.engine.parallel.collectives import Collectives, connect
from graftwork.engine.parallel.commands import Envelope
from graftwork.engine.parallel.leader import LeadingRunner, StepRunner
from graftwork.engine.parallel.mirrors import MirroredCopier, MirroredDisk, MirroredLora, mirror_moves
from graftwork.engine.parallel.ranks import Rank, check_divisible, model_of_rank
from graftwork.engine.parallel.row_ops import SummingRowOps
from graftwork.engine.parallel.weights import CheckpointModules, RankReader
from graftwork.engine.parallel.workers import StartWorker, Workers
from graftwork.engine.runner.model_runner import ModelRunner
from graftwork.platform.errors import InternalFailure, InvalidRequest

_log = logging.getLogger(__name__)

MakeCopier = Callable[[Report], PageCopier]
"""Makes this rank's own copier of pages, which reports to the given callback."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What an engine and its ranks know before they build anything."""

    config: EngineConfig
    """The settings of the whole engine."""
    model: ModelConfig
    """The sizes of the whole model."""
    fingerprint: str
    device: torch.device
    """The device of this rank."""
    dtype: torch.dtype


class EngineRanks(Protocol):
    """Gives an engine its share of the model and of the budgets, and lets other ranks take part in its work."""

    config: EngineConfig
    """The settings of this rank, with its share of the budgets."""
    model: ModelConfig
    """The sizes of this rank's part of the model."""
    layout: str
    """Names the content of this rank's KV pages, for files: the model, and which part of it."""
    probe_device: torch.device
    """Where uploads are tested, which needs whole layers: on the host if no rank has them on its device."""

    def tensors(self, reader: WeightReader) -> TensorSource: ...

    def agree(self, own: KvSizes) -> KvSizes:
        """Returns the sizes that all ranks take. All have as many frames as the rank that can hold the fewest."""
        ...

    def meet(self, storage: KvStorage, deliver: Callable[[Message], None]) -> None:
        """Waits until all ranks are built, and connects them."""
        ...

    def connected(self, own: RunnerParts) -> RunnerParts:
        """Returns parts for a runner whose steps all ranks compute."""
        ...

    def lora(self, own: LoraBackend) -> LoraBackend: ...

    def base(self, weights: DecoderWeights) -> BaseModules: ...

    def divide(self, adapter: ResidentAdapter) -> ResidentAdapter: ...

    def copies(self, make: MakeCopier, report: Report) -> CopyEngine: ...

    def disk(self) -> DiskPages: ...

    def runner(self, own: ModelRunner) -> StepRunner: ...

    def abandon(self) -> None:
        """Ends the other ranks if the engine cannot be built. Must not be called after `copies`."""
        ...


class SingleRank:
    """An engine on one device."""

    def __init__(self, settings: RankSettings) -> None:
        self.config = settings.config
        self.model = settings.model
        self.layout = settings.fingerprint
        self.probe_device = settings.device
        self._disk: DiskPages = NoDisk()

    def tensors(self, reader: WeightReader) -> TensorSource:
        return reader

    def agree(self, own: KvSizes) -> KvSizes:
        return own

    def meet(self, storage: KvStorage, deliver: Callable[[Message], None]) -> None:
        self._disk = storage.disk or NoDisk()

    def connected(self, own: RunnerParts) -> RunnerParts:
        return own

    def lora(self, own: LoraBackend) -> LoraBackend:
        return own

    def base(self, weights: DecoderWeights) -> BaseModules:
        return weights

    def divide(self, adapter: ResidentAdapter) -> ResidentAdapter:
        return adapter

    def copies(self, make: MakeCopier, report: Report) -> CopyEngine:
        return make(report)

    def disk(self) -> DiskPages:
        return self._disk

    def runner(self, own: ModelRunner) -> StepRunner:
        return own

    def abandon(self) -> None:
        """Does nothing: there is no other rank."""


class LeadingRank:
    """Rank 0 of an engine on several devices. Its workers are started when it is made."""

    def __init__(self, settings: RankSettings, start_worker: StartWorker) -> None:
        rank = Rank(0, settings.config.tensor_parallel)
        self.config = config_of_rank(settings.config, rank)
        self.model = model_of_rank(settings.model, rank.size)
        self.layout = layout_of_rank(settings.fingerprint, rank)
        self.probe_device = torch.device("cpu")
        self._settings = settings
        self._rank = rank
        self._folder = tempfile.TemporaryDirectory(prefix="graftwork-ranks-")
        self._workers = Workers([start_worker(number) for number in range(1, rank.size)])
        self._workers.introduce(orders_of(settings, Path(self._folder.name)))
        self._storage: KvStorage | None = None
        self._collectives: Collectives | None = None
        self._copies: MirroredCopier | None = None

    def tensors(self, reader: WeightReader) -> TensorSource:
        return RankReader(reader, self._settings.model, self._rank)

    def agree(self, own: KvSizes) -> KvSizes:
        least = min([own.device_pages, *(report["frames"] for report in self._workers.await_reports())])
        self._workers.send(Envelope("frames", {"frames": least}))
        return replace(own, device_pages=least)

    def meet(self, storage: KvStorage, deliver: Callable[[Message], None]) -> None:
        sizes = sizes_of(storage)
        for number, report in enumerate(self._workers.await_reports(), start=1):
            if report != sizes:
                raise InternalFailure(f"Rank {number} has other sizes than rank 0: {report}, not {sizes}.")
        collectives = connect(Path(self._folder.name), self._rank, self._settings.device)
        self._folder.cleanup()

        def lost(cause: str) -> None:
            collectives.abort()
            deliver(DeviceFailed(cause))

        self._workers.on_lost = lost
        self._storage, self._collectives = storage, collectives
        mirror_moves(storage.device_memory, self._workers)

    def connected(self, own: RunnerParts) -> RunnerParts:
        assert self._collectives is not None
        return connected(own, self._collectives)

    def lora(self, own: LoraBackend) -> LoraBackend:
        assert self._storage is not None
        return MirroredLora(own, self._storage.device_memory, self._workers)

    def base(self, weights: DecoderWeights) -> BaseModules:
        reader = open_weights(self.config.model, self._settings.model)
        return CheckpointModules(reader, self._settings.model, self._settings.dtype)

    def divide(self, adapter: ResidentAdapter) -> ResidentAdapter:
        return AdapterDivider(self._settings.model, self._rank.size).divide(adapter)

    def copies(self, make: MakeCopier, report: Report) -> CopyEngine:
        self._copies = MirroredCopier(report, self._workers)
        self._copies.attach(make(self._copies.own_report))
        self._workers.watch()
        return self._copies

    def disk(self) -> DiskPages:
        assert self._storage is not None
        return NoDisk() if self._storage.disk is None else MirroredDisk(self._storage.disk, self._workers)

    def runner(self, own: ModelRunner) -> StepRunner:
        assert self._storage is not None
        assert self._copies is not None
        return LeadingRunner(own, self._workers, self._copies, self._storage.cache.gates)

    def abandon(self) -> None:
        self._workers.abandon()
        self._folder.cleanup()


def connected(own: RunnerParts, ranks: Collectives) -> RunnerParts:
    """Returns the parts of a runner that sums and spreads tensors over `ranks`."""
    num_ranks = own.config.tensor_parallel
    return replace(own, wrap_rows=lambda rows: SummingRowOps(rows, ranks, num_ranks), spread=ranks.broadcast)


def check_division(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises InvalidRequest if the model cannot be divided as configured, or if a size can never serve.

    `model` is the whole model. Reads no weights.
    """
    check_divisible(model, config.tensor_parallel)
    rank = Rank(0, config.tensor_parallel)
    own = config_of_rank(config, rank)
    check_sizes(own, frame_sizer(own, model_of_rank(model, rank.size), dtype, device), device)


def choose_ranks(settings: RankSettings, start_worker: StartWorker) -> EngineRanks:
    """Returns the ranks that the setting `tensor_parallel` asks for.

    Raises InvalidRequest if there are too few devices.
    """
    num_ranks = settings.config.tensor_parallel
    if num_ranks == 1:
        return SingleRank(settings)
    device = settings.device
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if found < num_ranks or device.index not in (None, 0):
            raise InvalidRequest(
                f"--tensor-parallel {num_ranks} takes the devices cuda:0 to cuda:{num_ranks - 1}; torch finds {found} "
                f"CUDA devices, and the device is {device}. Give --device cuda and as many ranks as devices at most.",
                param="tensor_parallel",
            )
        loss = "each decoding step launches its kernels one by one, and waits for several copies to the device"
        _log.warning("cuda_graphs_unavailable", extra={"reason": "tensor parallelism", "loss": loss})
    return LeadingRank(settings, start_worker)


def config_of_rank(config: EngineConfig, rank: Rank) -> EngineConfig:
    """Returns the settings of one rank: its share of host memory and disk, and a KV folder of its own."""
    folder = None if config.kv_folder is None else config.kv_folder / f"rank-{rank.number}-of-{rank.size}"
    return replace(
        config,
        host_kv_bytes=config.host_kv_bytes // rank.size,
        disk_kv_bytes=config.disk_kv_bytes // rank.size,
        kv_folder=folder,
    )


def layout_of_rank(fingerprint: str, rank: Rank) -> str:
    return f"{fingerprint}/rank {rank.number} of {rank.size}"


def sizes_of(storage: KvStorage) -> dict[str, Any]:
    """Returns the sizes that must be equal on all ranks, because numbers of frames and pages are."""
    memory, host = storage.device_memory, storage.host
    return {"frames": memory.num_frames, "frame_bytes": memory.frame_bytes, "host_pages": host.num_pages}


def orders_of(settings: RankSettings, folder: Path) -> dict[str, Any]:
    """Returns what rank 0 tells a worker at its start, as JSON values."""
    config = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings.config).items()}
    return {
        "config": config,
        "fingerprint": settings.fingerprint,
        "device": settings.device.type,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "folder": str(folder),
    }


def config_from(orders: Mapping[str, Any]) -> EngineConfig:
    """Returns the engine's settings from a worker's orders."""
    values = dict(orders["config"])
    paths = {
        name: Path(values[name])
        for name in ("model", "kv_folder", "shared_kv_folder", "public_grammars", "calibration_folder")
        if values[name] is not None
    }
    return EngineConfig(**values | paths)
