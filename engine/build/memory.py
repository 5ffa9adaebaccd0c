"""Accounts for the memory of an engine's process: how many bytes each owner has, on the host and on a GPU.

Reads only. Owns no memory. The loop counts what changes with each request (adapters, grammars, drafts); this module adds
the large blocks that are allocated once, of which the system gives only the touched parts, and the rest of the process.
"""

from dataclasses import dataclass, replace

import torch

from graftwork.engine.core.stats import EngineStats
from graftwork.platform.memory import freed_bytes, resident_bytes, resident_bytes_at


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The blocks of memory that an engine allocates at its start."""

    weights_bytes: int
    """Bytes of the weights of the model, and of the draft model."""
    frames: torch.Tensor  # [num_frames + 2, frame_bytes] uint8: device memory of KV and adapters
    host_kv: torch.Tensor  # [num_pages, page_bytes] uint8
    draft_kv: torch.Tensor | None = None  # uint8: device memory of the draft model's KV

    def complete(self, stats: EngineStats) -> EngineStats:
        """Returns `stats` with the memory of all owners. Takes milliseconds; any thread may call this.

        On the host, the owners' bytes add up to the resident memory of this process. A block of memory counts with its
        resident part, because the system gives a process only the parts that it has written.
        """
        if self.frames.is_cuda:
            return self._with_rest(self._with_gpu(stats))
        frames_bytes = _resident(self.frames)
        on_device = min(stats.lora_pool_bytes, frames_bytes)
        return self._with_rest(
            replace(
                stats,
                memory_weights=self.weights_bytes,
                memory_device_kv=frames_bytes - on_device,
                memory_drafts=stats.memory_drafts + self._draft_kv_bytes,
                memory_adapters=stats.memory_adapters + on_device + stats.adapter_copy_bytes,
            )
        )

    @property
    def _draft_kv_bytes(self) -> int:
        if self.draft_kv is None:
            return 0
        return self.draft_kv.nbytes if self.draft_kv.is_cuda else _resident(self.draft_kv)

    def _with_rest(self, stats: EngineStats) -> EngineStats:
        """Adds the host tier, the memory that the C library keeps for the next step, and what no owner has."""
        host_kv = self.host_kv.nbytes if self.host_kv.is_pinned() else _resident(self.host_kv)
        owned = stats.memory_weights + stats.memory_device_kv + stats.memory_adapters + host_kv
        owned += stats.memory_grammars + stats.memory_drafts
        rest = max(resident_bytes() - owned, 0)
        workspace = min(freed_bytes(), rest)
        return replace(stats, memory_host_kv=host_kv, memory_workspace=workspace, memory_other=rest - workspace)

    def _with_gpu(self, stats: EngineStats) -> EngineStats:
        owned = self.weights_bytes + self.frames.nbytes + self._draft_kv_bytes + stats.adapter_copy_bytes
        return replace(
            stats,
            gpu_weights=self.weights_bytes,
            gpu_kv=self.frames.nbytes - stats.lora_pool_bytes,
            gpu_drafts=self._draft_kv_bytes,
            gpu_adapters=stats.lora_pool_bytes + stats.adapter_copy_bytes,
            gpu_workspace=max(torch.cuda.memory_reserved(self.frames.device) - owned, 0),
        )


def _resident(block: torch.Tensor) -> int:
    return resident_bytes_at(block.data_ptr(), block.nbytes) if block.nbytes else 0
