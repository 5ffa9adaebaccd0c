"""Tests an adapter before any request may use it. The engine's deltas must equal those that plain torch computes.

The test runs every group of projections (linear layers with the same input) on a few random inputs, in every layer. One
input has no adapter, and its output must not change. The test uses the torch backend in host memory. The kernels have
self-tests of their own (cpu_selftest.py, triton/selftest.py).
"""

from collections.abc import Iterator

import torch

from graftwork.engine.lora.fuse import BaseModules
from graftwork.engine.lora.packs import AdapterMix, PackCache
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.torch_backend import LoraBatch, Segment, TorchProducts
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.engine.model.layers import BatchInvariance
from graftwork.engine.model.projections import GROUPS, HEAD, HEAD_LAYER, ProjectionGroup
from graftwork.platform.errors import ValidationFailed

_NUM_ROWS = 5
_SEED = 20260
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The largest error, relative to the largest output. It covers a few roundings of inputs, factors and sums."""


def probe_adapter(weights: AdapterWeights, adapter: ResidentAdapter, base: BaseModules, dtype: torch.dtype) -> None:
    """Tests that the engine computes the deltas that the adapter's matrices define.

    Raises ValidationFailed if an output is wrong. The error names the group of projections, such as qkv.
    """
    generator = torch.Generator().manual_seed(_SEED)
    segment = Segment(1, _NUM_ROWS, AdapterMix(((adapter, 1.0),)))
    rules = BatchInvariance.of(dtype)
    batch = LoraBatch([segment], TorchProducts(PackCache(0, rules.min_columns), rules), rules, _NUM_ROWS)
    for layer, group in _groups_of(weights):
        modules = [base.module(layer, target) for target in group.targets]
        x = torch.randn(_NUM_ROWS, modules[0][0].shape[1], generator=generator).to(dtype)
        outputs = [_base_output(x, weight, bias) for weight, bias in modules]
        expected = torch.cat(
            [
                _expected(weights, layer, target, x[1:].float(), weight, bias)
                for target, (weight, bias) in zip(group.targets, modules, strict=True)
            ],
            dim=1,
        )
        y = torch.cat(outputs, dim=1).to(dtype)
        before = y.clone()
        batch.add_deltas(y, x, layer, group.name)
        _compare(_place(layer, group), before, y, expected, dtype)
    _probe_embedding(weights, batch, base, dtype)
    _probe_saved_head(weights, adapter, dtype)


def _probe_embedding(weights: AdapterWeights, batch: LoraBatch, base: BaseModules, dtype: torch.dtype) -> None:
    """Tests what the adapter changes in the embeddings of a few tokens.

    The base's rows are all ones. Any values serve, because the adapter adds to them or replaces them.
    """
    pair, saved = weights.embedding, weights.saved_embedding
    if pair is None and saved is None:
        return
    vocab_size, hidden_size = base.shape(HEAD_LAYER, "lm_head")
    token_ids = torch.arange(_NUM_ROWS) * (vocab_size // _NUM_ROWS)
    before = torch.ones(_NUM_ROWS, hidden_size, dtype=dtype)
    expected = before[1:].float() if saved is None else saved[token_ids[1:]].float()
    if pair is not None:
        expected = expected + pair.scale * (pair.A.float().t()[token_ids[1:]] @ pair.B.float().t())
    after = before.clone()
    batch.change_embedding(after, token_ids)
    _compare("embed_tokens", before, after, expected, dtype)


def _probe_saved_head(weights: AdapterWeights, adapter: ResidentAdapter, dtype: torch.dtype) -> None:
    if weights.saved_head is None:
        return
    if adapter.saved_head is None or not torch.equal(adapter.saved_head, weights.saved_head.to(dtype)):
        raise _mismatch("lm_head, as saved", "another matrix", dtype)


def _groups_of(weights: AdapterWeights) -> Iterator[tuple[int, ProjectionGroup]]:
    touched = {*weights.pairs, *weights.biases}
    for layer in sorted({layer for layer, _ in touched}):
        yield from ((layer, group) for group in GROUPS if any((layer, target) in touched for target in group.targets))
    if weights.head is not None:
        yield HEAD_LAYER, HEAD


def _base_output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.float() @ weight.float().cpu().t()
    return y if bias is None else y + bias.float().cpu()


def _expected(
    weights: AdapterWeights,
    layer: int,
    target: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the output of one module, computed as PEFT does, in fp32: [rows, out_features]."""
    pair = weights.head if layer == HEAD_LAYER else weights.pairs.get((layer, target))
    merged = weight.float().cpu()
    if pair is not None:
        merged = _merged(merged, pair)
    y = x @ merged.t()
    trained = weights.biases.get((layer, target), bias)
    if trained is not None:
        y = y + trained.float().cpu()
    return y if pair is None or pair.bias is None else y + pair.scale * pair.bias.float()


def _merged(weight: torch.Tensor, pair: LoraPair) -> torch.Tensor:
    merged = weight + pair.scale * (pair.B.float() @ pair.A.float())
    if pair.magnitude is None:
        return merged
    norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
    return merged * (pair.magnitude.float() / norms)[:, None]


def _place(layer: int, group: ProjectionGroup) -> str:
    return "lm_head" if layer == HEAD_LAYER else f"layer {layer}, {', '.join(group.targets)}"


def _compare(
    place: str,
    before: torch.Tensor,
    after: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    error = (after[1:].float() - expected).abs().max().item()
    size = max(expected.abs().max().item(), before.float().abs().max().item(), 1e-6)
    if not torch.equal(after[0], before[0]) or not error <= _TOLERANCE[dtype] * size:
        raise _mismatch(place, f"{error:.3g} where values reach {size:.3g}", dtype)


def _mismatch(place: str, difference: str, dtype: torch.dtype) -> ValidationFailed:
    return ValidationFailed(
        f"weights: {place}: the engine's result differs from the adapter's matrices by {difference}, more than {dtype} "
        "explains. The adapter would not behave as trained, so it is refused.",
        param="weights",
        code="adapter_probe_failed",
    )
