"""Tries the row kernels on a device at start: TritonRowOps against TorchRowOps, on one small step.

The step has a prompt that begins two pages, and a row that continues a page. So every kernel runs, in the forms that the
served model has: its kind of norms, its activation and its forms of rotation, with and without norms of heads. Keys and
values are stored as the engine stores them.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from graftwork.engine.core.step import RequestSlice, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.block import NormKind
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.engine.model.rotary import RotaryTables
from graftwork.engine.runner.input_batch import BatchBuilder
from graftwork.engine.runner.row_ops import RowOps, TorchRowOps
from graftwork.engine.runner.triton_row_ops import TritonRowOps
from graftwork.platform.ids import RequestId

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The largest error that passes, relative to the largest value: about four roundings."""
_CODE_STEP = {"auto": 0.0, "int8": 1 / 127, "fp8": 1 / 14}
"""The largest distance of two adjacent codes, relative to the largest: a rounding may lead to another code."""
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
    ropes=(RopeConfig(theta=10_000.0, scaling=None, attention_factor=1.0),),
    biased_targets=(),
    has_qk_norm=True,
    windows=(None,),
    tie_word_embeddings=False,
    context_tokens=64,
    eos_token_ids=(0,),
    dtype="float32",
)


def why_row_kernels_fail(
    device: torch.device, dtype: torch.dtype, served: ModelConfig = _MODEL, kv_dtype: str = "auto"
) -> str | None:
    """Returns why the row kernels cannot be used on a device for the served model; None if their results are those of
    torch. `kv_dtype` is that of EngineConfig.
    """
    model = _small(served)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            plain, kernels = (_results(kind, model, device, dtype, kv_dtype) for kind in (TorchRowOps, TritonRowOps))
    except Exception as error:  # noqa: BLE001 - compilers, drivers and linkers each fail in a way of their own
        first_line = next(iter(str(error).strip().splitlines()), "no message")
        return f"{type(error).__name__}: {first_line}"
    error_of_all = max(_error(*pair) for pair in zip(kernels, plain, strict=True))
    if error_of_all <= _TOLERANCE[dtype] + _CODE_STEP[kv_dtype]:
        return None
    return f"results differ from plain torch by {error_of_all:.3g}, of the largest"


def _small(served: ModelConfig) -> ModelConfig:
    """Returns a small model with the norms, the activation and the rotations of the served one. If that has layers with
    queries alone, so has the last layer.
    """
    forms = [
        rope and RopeConfig(rope.theta, share=rope.share, is_interleaved=rope.is_interleaved) for rope in served.ropes
    ]
    ropes = tuple(dict.fromkeys(forms))
    sources: tuple[int, ...] = ()
    if served.query_layers:
        ropes, sources = (*ropes, ropes[0]), (*range(len(ropes)), 0)
    return replace(
        _MODEL,
        num_layers=len(ropes),
        windows=(None,) * len(ropes),
        ropes=ropes,
        kv_sources=sources,
        block=served.block,
        activation=served.activation,
        scales=replace(_MODEL.scales, residual=served.scales.residual),
    )


def _results(
    kind: type[TorchRowOps] | type[TritonRowOps],
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: str,
) -> Sequence[torch.Tensor]:
    """Returns the results of all row operations of one small step, and the pages that it has written."""
    form = kv_format(kv_dtype, dtype)
    memory = DeviceMemory(_NUM_FRAMES, bytes_per_page(model, _PAGE_TOKENS, dtype, form), device)
    cache = KvCache(model, memory, _PAGE_TOKENS, dtype, form)
    for layer in range(model.num_layers):
        for stored in cache.stored(layer):
            for part in stored.parts:
                part[:_NUM_FRAMES] = 1.0
    rows: RowOps = kind(model, RotaryTables.of(model, device), cache)
    builder = BatchBuilder(_PAGE_TOKENS, memory.null_frame, device, BatchInvariance(1, 1))
    prompt = RequestSlice(RequestId("prompt"), (0,) * 7, 0, (PageId(3), PageId(0)), (), ())
    row = RequestSlice(RequestId("row"), (0,), 5, (PageId(4), PageId(1)), (), ())
    batch = builder.build(StepPlan((prompt, row)))

    generator = torch.Generator().manual_seed(_SEED)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    kept = dtype if model.block.norm is NormKind.RMS else torch.float32
    num_tokens = len(batch.token_ids)
    hidden, x = rows.add_norm(noise(num_tokens, 80), noise(num_tokens, 80), noise(80).to(kept), noise(80).to(kept))
    step = rows.plan(batch)
    results = [hidden, x, rows.norm(hidden, noise(80).to(kept)), rows.activate(noise(num_tokens, 96))]
    results.append(rows.add(noise(num_tokens, 80), noise(num_tokens, 80)))
    norms_heads = model.block.norm is not NormKind.LAYER  # heads are normalised by their mean squares alone
    if norms_heads:
        whole = noise(num_tokens, 160)
        rows.norm_wide(whole, (noise(96).to(kept), noise(32).to(kept)))
        results.append(whole)
    for layer in range(model.num_layers):
        num_heads = 6 if layer in model.query_layers else 10
        num_normed = num_heads if model.block.has_value_norm else min(num_heads, 8)
        for is_normed in (True, False) if norms_heads else (False,):
            if model.block.has_value_norm and not is_normed:
                continue
            qk_norm = noise(num_normed, 16).to(kept) if is_normed else None
            results.append(step.rotate_and_store(noise(num_tokens, 16 * num_heads), layer, qk_norm))
            numbered = torch.arange(_NUM_FRAMES, device=device)
            results += [form.decode(stored.at_pages(numbered)) for stored in cache.stored(layer)]
    return results


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error, relative to the largest expected value. NaN counts as infinite."""
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float("inf") if error.isnan() else error.item()
