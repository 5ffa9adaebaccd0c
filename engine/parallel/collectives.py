"""Adds and spreads tensors over the ranks of one engine, through torch's process groups.

Owns one process group: NCCL on GPUs, gloo on CPUs. All ranks must make the same calls in the same order, with tensors of
the same shapes; the plan of a step decides them. The group is an object, not torch's global default group.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from graftwork.engine.parallel.ranks import Rank

_STEP_TIMEOUT = timedelta(minutes=10)
"""The longest time that a rank waits for the others inside of a step. Then the step raises, and the engine ends."""


class _Work(Protocol):
    def wait(self) -> object: ...


class _Group(Protocol):
    """What torch's process groups of all kinds can do."""

    def allreduce(self, tensors: list[torch.Tensor]) -> _Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> _Work: ...

    def abort(self) -> None: ...


class Collectives:
    """The process group of an engine's ranks. Only the thread that computes steps may use it, except for `abort`."""

    def __init__(self, group: _Group) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` on all ranks by its sum over the ranks. On CUDA it runs on the current stream.

        The sum has the same bits on all ranks. Raises RuntimeError if another rank has ended (gloo).
        """
        self._group.allreduce([tensor]).wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces `tensor` on all ranks by that of rank 0."""
        self._group.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        """Ends all calls that wait for other ranks. The group cannot be used any more. Any thread may call it."""
        self._group.abort()


def connect(folder: Path, rank: Rank, device: torch.device) -> Collectives:
    """Connects this rank with the others. Waits until all ranks are connected.

    `folder` is a folder that only this user may open; the ranks find each other through a file in it. The file is not
    needed after this call on any rank.
    """
    store = torch._C._distributed_c10d.FileStore(str(folder / "ranks"), rank.size)
    collectives = Collectives(_group(store, rank, device))
    first = torch.zeros(1, device=device)  # NCCL connects in its first call
    collectives.all_reduce(first)
    first.item()
    return collectives


def _group(store: torch._C._distributed_c10d.Store, rank: Rank, device: torch.device) -> Any:
    if device.type == "cuda":
        nccl = distributed.ProcessGroupNCCL.Options()
        nccl._timeout = _STEP_TIMEOUT
        return distributed.ProcessGroupNCCL(store, rank.number, rank.size, nccl)
    gloo: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo._timeout = _STEP_TIMEOUT
    return distributed.ProcessGroupGloo(store, rank.number, rank.size, gloo)
