"""Converts an adapter, as it was read from its files, into the form that the forward pass uses.

In this form all tensors are in one buffer and have the engine's dtype. Owns no state. Runs on a loading
thread, never in the engine loop.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional

from graftwork.engine.lora.resident_adapter import (
    RANK_PAGE,
    EmbeddingDelta,
    ExpertDelta,
    GroupDelta,
    ResidentAdapter,
    SliceDelta,
    compacted,
    pages_of_ranks,
)
from graftwork.engine.lora.weights import AdapterWeights, ExpertPair, LoraPair
from graftwork.engine.model.projections import HEAD, HEAD_LAYER, ProjectionGroup, place_of, stored_inputs, stored_width
from graftwork.platform.errors import ValidationFailed

Module = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out_features, in_features] and bias [out_features] of a linear layer."""


class BaseModules(Protocol):
    """Gives access to the weights and biases of the base model's linear layers, which some adapters need.

    A DoRA adapter rescales the outputs of a layer, and computes the scales from the layer's weight. A trained bias
    replaces the layer's own bias.
    """

    def groups(self, layer: int) -> Sequence[ProjectionGroup]:
        """Returns the groups of linear layers that a decoder layer has, each with the targets that it has."""
        ...

    def module(self, layer: int, target: str) -> Module:
        """Returns the weight and the bias of one linear layer of the base model. Each may be a copy.

        `target` is the layer's name, such as "q_proj". The output head has `layer` HEAD_LAYER and `target` "lm_head".
        """
        ...

    def shape(self, layer: int, target: str) -> tuple[int, int]:
        """Returns (out_features, in_features) of one linear layer of the base model. `target` is a name such as
        "q_proj".
        """
        ...


def build_resident(weights: AdapterWeights, base: BaseModules, dtype: torch.dtype) -> ResidentAdapter:
    """Builds an adapter in CPU memory, ready to be copied to the device in one transfer.

    Raises ValidationFailed if a value is too large for `dtype`. Such a value would become infinite.
    """
    deltas: dict[tuple[int, str], GroupDelta] = {}
    for layer in sorted({layer for layer, _ in (*weights.pairs, *weights.biases)}):
        for group in base.groups(layer):
            changes = [_change_of(weights, layer, target) for target in group.targets]
            if any(change != (None, None) for change in changes):
                deltas[layer, group.name] = _group(base, dtype, layer, group, changes)
    if weights.head is not None:
        deltas[HEAD_LAYER, HEAD.name] = _group(base, dtype, HEAD_LAYER, HEAD, [(weights.head, None)])
    adapter = compacted(
        weights.digest,
        deltas,
        None if weights.embedding is None else _embedding(weights.embedding, dtype),
        _cast(weights.saved_embedding, dtype),
        _cast(weights.saved_head, dtype),
        {key: _expert_delta(pair, dtype) for key, pair in sorted(weights.experts.items())},
        None if weights.input_embedding is None else _embedding(weights.input_embedding, dtype),
    )
    _check_finite(adapter, dtype)
    return adapter


Change = tuple[LoraPair | None, torch.Tensor | None]
"""An adapter's change of one linear layer: low-rank factors, and a bias that replaces the base model's."""


def _change_of(weights: AdapterWeights, layer: int, target: str) -> Change:
    return weights.pairs.get((layer, target)), weights.biases.get((layer, target))


@dataclass(frozen=True, slots=True)
class _Columns:
    """The change y = scale * y + shift of a target's outputs. Both vectors are fp32 [out_features]."""

    scale: torch.Tensor
    shift: torch.Tensor


def _group(
    base: BaseModules, dtype: torch.dtype, layer: int, group: ProjectionGroup, changes: Sequence[Change]
) -> GroupDelta:
    shapes = [base.shape(layer, target) for target in group.targets]
    widths = [stored_width(target, shape[0]) for target, shape in zip(group.targets, shapes, strict=True)]
    columns = [
        _columns(base.module(layer, target), *change) if _touches_columns(*change) else None
        for target, change in zip(group.targets, changes, strict=True)
    ]
    pairs = [pair for pair, _ in changes if pair is not None]
    return GroupDelta(
        A=_stacked_factors(pairs, stored_inputs(group.targets[0], shapes[0][1]), dtype),
        scales=_scales(pairs, dtype),
        slices=tuple(_slices(widths, changes, columns, dtype)),
        column_scale=_joined([None if each is None else each.scale for each in columns], widths, 1.0),
        column_shift=_joined([None if each is None else each.shift for each in columns], widths, 0.0),
    )


def _touches_columns(pair: LoraPair | None, trained_bias: torch.Tensor | None) -> bool:
    """Returns whether the adapter scales or shifts the base's own outputs (DoRA, biases)."""
    return trained_bias is not None or (pair is not None and (pair.magnitude is not None or pair.bias is not None))


def _columns(module: Module, pair: LoraPair | None, trained_bias: torch.Tensor | None) -> _Columns:
    """Returns the scale and shift of the base's own outputs."""
    weight, bias = module
    is_renormalised = pair is not None and pair.magnitude is not None
    added_bias = None if pair is None or pair.bias is None else pair.scale * pair.bias.float()
    scale = torch.ones(weight.shape[0])
    if is_renormalised:
        assert pair is not None
        scale = _renormalisation(weight, pair)
    own = torch.zeros(weight.shape[0]) if bias is None else bias.float().cpu()
    final = own if trained_bias is None else trained_bias.float()
    shift = final - scale * own
    return _Columns(scale, shift if added_bias is None else shift + added_bias)


def _renormalisation(weight: torch.Tensor, pair: LoraPair) -> torch.Tensor:
    """Returns DoRA's factor of every output: magnitude / norm of the row of W + scale * B @ A, in fp32.

    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024), section 4; PEFT's DoraLinearLayer.
    """
    assert pair.magnitude is not None
    merged = weight.float().cpu() + pair.scale * (pair.B.float() @ pair.A.float())
    norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
    return pair.magnitude.float() / norms


def _slices(
    widths: Sequence[int],
    changes: Sequence[Change],
    columns: Sequence[_Columns | None],
    dtype: torch.dtype,
) -> Iterator[SliceDelta]:
    rank_start = out_start = 0
    for width, (pair, _), own_columns in zip(widths, changes, columns, strict=True):
        out_end = out_start + width
        if pair is not None:
            rank_end = rank_start + pages_of_ranks(pair.rank)
            rescaled = pair.magnitude is not None and own_columns is not None
            B = pair.B.float() * own_columns.scale[:, None] if rescaled and own_columns is not None else pair.B
            left = 1.0 if _is_exact(pair.scale, dtype) else pair.scale
            yield SliceDelta(_stored_factor(B, width, dtype), rank_start, rank_end, out_start, out_end, left)
            rank_start = rank_end
        out_start = out_end


def _joined(parts: Sequence[torch.Tensor | None], widths: Sequence[int], otherwise: float) -> torch.Tensor | None:
    """Returns the vectors of a group's targets, joined. None if no target has a vector."""
    if all(part is None or bool((part == otherwise).all()) for part in parts):
        return None
    filled = [torch.full((width,), otherwise) for width in widths]
    for whole, part in zip(filled, parts, strict=True):
        if part is not None:
            whole[: len(part)] = part
    return torch.cat(filled)


def _stacked_factors(pairs: Sequence[LoraPair], in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns A of all slices: [sum of ranks in pages, in_features]. Rows of zeros fill the pages, and columns of zeros a
    narrow layer's inputs.
    """
    missing = in_features - pairs[0].A.shape[1] if pairs else 0
    if missing:
        pairs = [replace(pair, A=functional.pad(pair.A, (0, missing))) for pair in pairs]
    scales = {pair.scale if _is_exact(pair.scale, dtype) else 1.0 for pair in pairs}
    if len(scales) == 1 and all(pair.rank % RANK_PAGE == 0 for pair in pairs):  # as most are: in two operations
        (scale,) = scales
        stacked = torch.cat([pair.A for pair in pairs]).to(dtype)
        return stacked if scale == 1.0 else stacked.mul_(scale)
    rows: list[torch.Tensor] = []
    for pair in pairs:
        is_scaled = _is_exact(pair.scale, dtype) and pair.scale != 1.0
        rows.append(pair.A.to(dtype, copy=True).mul_(pair.scale) if is_scaled else pair.A.to(dtype))
        missing = pages_of_ranks(pair.rank) - pair.rank
        if missing:
            rows.append(torch.zeros(missing, in_features, dtype=dtype))
    return torch.cat(rows) if rows else torch.empty(0, in_features, dtype=dtype)


def _scales(pairs: Sequence[LoraPair], dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the scales that are not multiplied into A. None if all are multiplied into A."""
    left = [1.0 if _is_exact(pair.scale, dtype) else pair.scale for pair in pairs]
    if all(scale == 1.0 for scale in left):
        return None
    return torch.cat([torch.full((pages_of_ranks(pair.rank),), scale) for pair, scale in zip(pairs, left, strict=True)])


def _is_exact(scale: float, dtype: torch.dtype) -> bool:
    """Returns whether multiplying by `scale` only changes the exponent, and the dtype has room for that."""
    return dtype != torch.float16 and math.frexp(scale)[0] == 0.5 and 2**-16 <= scale <= 2**16


def _stored_factor(B: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns B as it is stored: [ranks in pages, width], from [out_features, rank]. `width` is at least out_features."""
    out_features, rank = B.shape
    no_ranks, no_columns = pages_of_ranks(rank) - rank, width - out_features
    transposed = B.to(dtype).t()
    return functional.pad(transposed, (0, no_columns, 0, no_ranks)) if no_ranks or no_columns else transposed


def _expert_delta(pair: ExpertPair, dtype: torch.dtype) -> ExpertDelta:
    """Returns the change of experts as it is stored. Ranks of zeros fill the pages."""
    A, B, scales = pair.A.to(dtype), pair.B.to(dtype).transpose(1, 2), pair.scales
    if all(_is_exact(scale, dtype) for scale in set(scales.flatten().tolist())):
        A, scales = A * scales[..., None].to(dtype), torch.ones_like(scales)
    missing = pages_of_ranks(A.shape[1]) - A.shape[1]
    A, B = (functional.pad(matrix, (0, 0, 0, missing)) for matrix in (A, B))
    return ExpertDelta(A, B, None if bool((scales == 1.0).all()) else functional.pad(scales, (0, missing), value=1.0))


def _embedding(pair: LoraPair, dtype: torch.dtype) -> EmbeddingDelta:
    return EmbeddingDelta(A=pair.A.to(dtype).t(), B=pair.B.to(dtype).t(), scale=pair.scale)


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _check_finite(adapter: ResidentAdapter, dtype: torch.dtype) -> None:
    if _is_of_one_dtype(adapter) and _is_finite(adapter.buffer.view(dtype)):
        return  # by far the most are; else look for the one to name
    for (layer, group), delta in adapter.deltas.items():
        tensors = [delta.A, *(part.B for part in delta.slices), delta.column_scale, delta.column_shift]
        if not all(_is_finite(tensor) for tensor in tensors if tensor is not None):
            raise _overflow(place_of(layer, HEAD.targets[0] if layer == HEAD_LAYER else group), dtype)
    for (layer, group), experts in adapter.experts.items():
        if not (_is_finite(experts.A) and _is_finite(experts.B)):
            raise _overflow(f"layer {layer}, {group}", dtype)
    for name, table in (("embed_tokens", adapter.embedding), ("embed_tokens_per_layer", adapter.input_embedding)):
        if table is not None and not (_is_finite(table.A) and _is_finite(table.B)):
            raise _overflow(name, dtype)
    for tensor in (adapter.saved_embedding, adapter.saved_head):
        if tensor is not None and not _is_finite(tensor):
            raise _overflow("modules_to_save", dtype)


def _is_of_one_dtype(adapter: ResidentAdapter) -> bool:
    is_plain = all(delta.scales is None and delta.is_low_rank for delta in adapter.deltas.values())
    return is_plain and all(delta.scales is None for delta in adapter.experts.values())


def _is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether all values are finite, in one pass. This finds NaN too, because every comparison with NaN is
    false.
    """
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return low.item() > -math.inf and high.item() < math.inf


def _overflow(where: str, dtype: torch.dtype) -> ValidationFailed:
    return ValidationFailed(
        f"weights: {where}: a value does not fit {dtype}, in which this engine computes, or DoRA divides by nothing. "
        "Train with smaller values, or start the engine with GRAFTWORK_DTYPE=float32.",
        param="weights",
        code="adapter_out_of_range",
    )
