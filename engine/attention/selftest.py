"""Tests the Triton attention kernels on a device at the engine's start, before any request uses them.

Triton compiles a kernel at its first launch. A machine may lack the tools that Triton needs for this, and on a new
device the results may be wrong. The test computes decoding rows, drafts and a chunk of random numbers with the sizes of
the engine's model, over pages as the engine stores them, and compares the results with fp64. A second test has rows with a
rolling window too.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.attention.launch import ScoreRules
from graftwork.engine.attention.reference import attend
from graftwork.engine.attention.triton_attention import TritonAttention, rotation_of
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.kv_format import StoredKv, kv_format
from graftwork.engine.model.config import ModelConfig
from graftwork.platform.ids import RequestId

_SEED = 20262
_SLICES = ((0, 1, 0), (300, 3, 2), (37, 1, 0), (30, 41, 0))
"""For each request: the first position, the number of tokens, and how many of them are drafts."""
_ROLLING_SLICES = ((305, 3, 2), (70, 41, 0))
"""The same of requests with a rolling window."""
_WINDOW = RollingWindow(sinks=3, window=50)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""The largest error, relative to the largest value: the roundings of weights and of the result, and a margin."""


@dataclass(frozen=True, slots=True)
class _Served:
    """What the kernels are tested for."""

    model: ModelConfig
    page_tokens: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: str
    rolling: bool


def why_attention_fails(
    model: ModelConfig,
    page_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_dtype: str = "auto",
    rolling: bool = False,
) -> str | None:
    """Returns what is wrong with the attention kernels for a model on a device, as a text for the log.

    `kv_dtype` is that of EngineConfig. Tests one layer for each window and rotary embedding that a layer of the model has. With `rolling`, tests rows with a
    rolling window beside others. Returns None if the results agree with fp64.
    """
    kinds = dict.fromkeys(zip(model.windows, model.ropes, strict=True))
    windows, ropes = (tuple(part) for part in zip(*kinds, strict=True))
    small = replace(model, num_layers=len(kinds), windows=windows, ropes=ropes, kv_sources=())
    served = _Served(small, page_tokens, device, dtype, kv_dtype, rolling)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            errors = [_error(served, layer) for layer in range(len(kinds))]
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"
    wrong = [f"{error:.3g} of the largest" for error in errors if not error <= _TOLERANCE[dtype]]
    return f"results differ from fp64 by {', '.join(wrong)}" if wrong else None


def _error(served: _Served, layer: int) -> float:
    """Returns the largest error of a step in one layer, relative to the largest value of the reference."""
    model, device, dtype = served.model, served.device, served.dtype
    generator = torch.Generator().manual_seed(_SEED)
    placed = _placed(served.page_tokens, with_rolling=served.rolling)
    last = placed[-1]
    num_rows = last.start_row + len(last.piece.token_ids)
    num_pages = sum(len(one.piece.pages) for one in placed)
    form = kv_format(served.kv_dtype, dtype)
    memory = DeviceMemory(num_pages, bytes_per_page(model, served.page_tokens, dtype, form), device)
    cache = KvCache(model, memory, served.page_tokens, dtype, form)
    for stored in cache.stored(layer):
        rows = torch.randn(stored.codes.shape, generator=generator).to(dtype)
        for part, own in zip(stored.parts, form.encode(rows).parts, strict=True):
            part.copy_(own)
    query = torch.randn(num_rows, model.num_heads, model.head_dim, generator=generator).to(dtype)
    batch = AttentionBatch(placed, torch.zeros(num_rows, dtype=torch.int64, device=device))

    sinks = torch.randn(model.num_heads, generator=generator) if model.block.has_sinks else None
    of_layers = None if sinks is None else [sinks.to(device)] * model.num_layers

    mixed = TritonAttention(model, cache, dtype, of_layers).plan(batch).attend(layer, query.to(device)).cpu()

    rules = ScoreRules(model.score_scale, model.windows[layer], model.scales.attention_cap, sinks)
    rope = model.ropes[layer]
    rotation = None if rope is None else rotation_of(model, rope, torch.device("cpu"))
    exact = kv_format(served.kv_dtype, torch.float32)
    keys, values = (exact.decode(StoredKv(*(part.cpu() for part in one.parts))) for one in cache.stored(layer))
    expected = attend(query, keys, values, batch, rules, rotation)
    return ((mixed.double() - expected).abs().max() / expected.abs().max()).item()


def _placed(page_tokens: int, *, with_rolling: bool) -> tuple[PlacedSlice, ...]:
    placed: list[PlacedSlice] = []
    start_row = first_page = 0
    slices = [*_SLICES, *(_ROLLING_SLICES if with_rolling else ())]
    for number, (start, count, num_drafts) in enumerate(slices):
        num_pages = pages_for(start + count, page_tokens)
        pages = tuple(PageId(page) for page in reversed(range(first_page, first_page + num_pages)))
        sample = SampleSpec(SamplingParams(max_tokens=1), seed=0, position=start)
        samples = (sample,) * (num_drafts + 1)
        window = None if number < len(_SLICES) else _WINDOW
        piece = RequestSlice(RequestId(str(number)), (0,) * count, start, pages, (), samples, rolling_window=window)
        placed.append(PlacedSlice(start_row, piece))
        start_row += count
        first_page += num_pages
    return tuple(placed)
