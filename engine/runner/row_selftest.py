"""Tries the row kernels on a device at start: TritonRowOps against TorchRowOps, on one small step.

The step has a prompt that begins two pages, and a row that continues a page. So every kernel runs, with and without
norms of heads.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.layers import BatchInvariance, RotaryTable
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.row_ops import RowOps, TorchRowOps
from graftwork.engine.runner.triton_row_ops import TritonRowOps
from graftwork.platform.ids import RequestId

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The largest error that passes, relative to the largest value: about four roundings."""
_PAGE_TOKENS, _NUM_FRAMES, _SEED = 4, 5, 3
_MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=80,
    intermediate_size=48,
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, scaling=None, attention_factor=1.0),
    biased_targets=(),
    has_qk_norm=True,
    windows=(None,),
    tie_word_embeddings=False,
    context_tokens=64,
    eos_token_ids=(0,),
    dtype="float32",
)


def why_row_kernels_fail(device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the row kernels cannot be used on a device; None if their results are those of torch."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            plain, kernels = (_results(kind, device, dtype) for kind in (TorchRowOps, TritonRowOps))
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"
    error_of_all = max(_error(*pair) for pair in zip(kernels, plain, strict=True))
    if error_of_all <= _TOLERANCE[dtype]:
        return None
    return f"results differ from plain torch by {error_of_all:.3g}, of the largest"


def _results(
    kind: type[TorchRowOps] | type[TritonRowOps], device: torch.device, dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Returns the results of all row operations of one small step, and the pages that it has written."""
    memory = DeviceMemory(_NUM_FRAMES, bytes_per_page(_MODEL, _PAGE_TOKENS, dtype), device)
    cache = KvCache(_MODEL, memory, _PAGE_TOKENS, dtype)
    for part in cache.layer(0):
        part[:_NUM_FRAMES] = 1.0
    rotary = RotaryTable(_MODEL.head_dim, _MODEL.rope, _MODEL.context_tokens, device)
    rows: RowOps = kind(_MODEL, rotary, cache)
    builder = BatchBuilder(_PAGE_TOKENS, memory.null_frame, device, BatchInvariance(1, 1))
    prompt = RequestSlice(RequestId("prompt"), (0,) * 7, 0, (PageId(3), PageId(0)), (), ())
    row = RequestSlice(RequestId("row"), (0,), 5, (PageId(4), PageId(1)), (), ())
    batch = builder.build(StepPlan((prompt, row)))

    generator = torch.Generator().manual_seed(_SEED)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    num_tokens = len(batch.token_ids)
    hidden, x = rows.add_norm(noise(num_tokens, 80), noise(num_tokens, 80), noise(80))
    step = rows.plan(batch)
    results = [hidden, x, rows.norm(hidden, noise(80)), rows.activate(noise(num_tokens, 96))]
    for qk_norm in (noise(8, 16), None):
        results.append(step.rotate_and_store(noise(num_tokens, 160), 0, qk_norm))
        results += [part[:_NUM_FRAMES].clone() for part in cache.layer(0)]
    return results


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error, relative to the largest expected value. NaN counts as infinite."""
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float("inf") if error.isnan() else error.item()
