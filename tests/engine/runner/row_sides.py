"""Two implementations of the row operations side by side, and small batches for them.

Needs neither hypothesis nor peft, so that tests on a GPU machine can use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.model.rotary import RotaryTables
from graftwork.engine.runner.input_batch import BatchBuilder, BatchTensors
from graftwork.engine.runner.row_ops import RowOps
from graftwork.platform.ids import RequestId

CPU = torch.device("cpu")
PAGE_TOKENS, NUM_FRAMES = 4, 12
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=40,
    intermediate_size=24,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=12,
    rms_norm_eps=1e-5,
    ropes=(RopeConfig(10_000.0, None, 1.0),) * 2,
    biased_targets=(),
    has_qk_norm=True,
    windows=(None, None),
    tie_word_embeddings=False,
    context_tokens=64,
    eos_token_ids=(0,),
    dtype="float32",
)


@dataclass(frozen=True)
class Side:
    """One implementation of the row operations, with pages of its own that are full of NaN: codes have NaN for scales."""

    rows: RowOps
    cache: KvCache

    def pages(self, layer: int) -> torch.Tensor:
        """Keys and values, or their codes, of the numbered frames and the null frame; padding rows write into the frame after
        them.
        """
        return torch.stack([part[: NUM_FRAMES + 1] for part in self.cache.layer(layer)])

    def scales(self, layer: int) -> torch.Tensor:
        """The bits of the scales of codes in the same frames."""
        found = [one.scales for one in self.cache.stored(layer)]
        return torch.stack([one[: NUM_FRAMES + 1].view(torch.int16) for one in found if one is not None])


def side(
    kind: type,
    model: ModelConfig = MODEL,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    kv_dtype: str = "auto",
) -> Side:
    form = kv_format(kv_dtype, dtype)
    memory = DeviceMemory(NUM_FRAMES, bytes_per_page(model, PAGE_TOKENS, dtype, form), device)
    cache = KvCache(model, memory, PAGE_TOKENS, dtype, form)
    for layer in range(model.num_layers):
        for part in (part for stored in cache.stored(layer) for part in stored.parts):
            part[:NUM_FRAMES] = float("nan") if part.is_floating_point() else 113
    rotary = RotaryTables.of(model, device)
    return Side(kind(model, rotary, cache), cache)


def batch_of(slices: Sequence[tuple[int, int]], min_rows: int = 1, device: torch.device = CPU) -> BatchTensors:
    """A batch of slices (start, tokens). Each takes pages of its own, the highest free ones first."""
    free = list(range(NUM_FRAMES))
    pieces = []
    for number, (start, count) in enumerate(slices):
        pages = tuple(PageId(free.pop()) for _ in range(-(-(start + count) // PAGE_TOKENS)))
        pieces.append(RequestSlice(RequestId(f"req_{number}"), (0,) * count, start, pages, (), ()))
    rules = BatchInvariance(min_rows, 1)
    return BatchBuilder(PAGE_TOKENS, NUM_FRAMES, device, rules).build(StepPlan(tuple(pieces)))
