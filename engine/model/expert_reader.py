"""Reads the weights of routed layers from a checkpoint, which has one of three layouts:

    mlp.experts.3.gate_proj.weight, …       each linear layer of each expert, plain or in a quantised form
    mlp.experts.gate_up_proj, …             all experts together, plain, as ExpertTensors says
    mlp.experts.gate_up_proj_blocks, …      the same as MXFP4, rows of outputs

MXFP4 stays as codes if the kernels of a GPU are to read them, and becomes dense otherwise. Plain experts are rounded here if
--quantization says so. Routers and the gates of shared experts stay plain: a checkpoint
that has them quantised gives them as its library computes them.

Owns no weights. Never ignores a tensor: what is not read here is refused as a leftover.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import MXFP4_BLOCK, ExpertsConfig, ExpertTensors, RouterScore
from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import (
    AnyLinear,
    DenseWeights,
    RoutedWeights,
    SharedWeights,
    joined_linear,
    placed,
)
from graftwork.engine.model.projections import stored_width
from graftwork.engine.model.weight_reader import QUANTIZED_PARTS, TensorSource, read_plain, skip_zero_bias
from graftwork.engine.quantization.linear import LinearWeight, StepKinds
from graftwork.engine.quantization.mxfp4 import from_mxfp4
from graftwork.engine.quantization.rounding import rounded
from graftwork.engine.quantization.weight import QuantizedWeight


class ExpertReader:
    """Reads routed layers onto a device. Raises InvalidRequest, as TensorSource does, with the name of a wrong tensor."""

    def __init__(
        self,
        reader: TensorSource,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        kinds: StepKinds,
        *,
        keeps_mxfp4: bool = False,
    ) -> None:
        """`kinds` tells quantised layers which rows of a step decode. With `keeps_mxfp4`, experts in MXFP4 stay as codes."""
        assert config.experts is not None
        self._reader = reader
        self._experts: ExpertsConfig = config.experts
        self._shapes = config.experts.shapes
        self._quantization = config.quantization
        self._kinds = kinds
        self._biased = config.biased_targets
        self._modules = config.modules
        self._device = device
        self._dtype = dtype
        self._keeps_mxfp4 = keeps_mxfp4

    def layer(self, index: int) -> RoutedWeights:
        """Returns the weights of one routed layer."""
        prefix = self._prefix(index)
        multiplies_in_fp32 = self._experts.router.score is RouterScore.SIGMOID
        dtype = torch.float32 if multiplies_in_fp32 else self._dtype
        router = f"{prefix}.{self._shapes.names.router}"
        return RoutedWeights(
            router=self._padded(router, "router", dtype),
            correction=self._correction(router) if multiplies_in_fp32 else None,
            experts=tuple(self._experts_of(f"{prefix}.experts")),
            shared=self._shared(prefix),
            step_kinds=self._kinds,
        )

    def _prefix(self, index: int) -> str:
        """Returns the name of a layer's MLP in the files."""
        names = self._shapes.names
        found = (f"model.layers.{index}.{block}" for block in names.blocks)
        return next(
            (
                prefix
                for prefix in found
                for part in ("weight", *QUANTIZED_PARTS)
                if f"{prefix}.{names.router}.{part}" in self._reader
            ),
            f"model.layers.{index}.{names.blocks[0]}",
        )

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        return self._reader.read(name, shape).to(self._device, self._dtype)

    def _correction(self, router: str) -> torch.Tensor:
        name = f"{router}.e_score_correction_bias"
        return self._reader.read(name, (self._shapes.num_experts,)).to(self._device, torch.float32)

    def _padded(self, module: str, target: str, dtype: torch.dtype) -> Linear:
        """Reads a narrow linear layer, and gives it outputs of zeros."""
        out_features, in_features = self._experts.target_shapes[target]
        missing = stored_width(target, out_features) - out_features
        weight = read_plain(self._reader, module, (out_features, in_features)).to(self._device, dtype)
        bias = self._read(f"{module}.bias", out_features) if target in self._biased else None
        return Linear(
            functional.pad(weight, (0, 0, 0, missing)),
            None if bias is None else functional.pad(bias, (0, missing)),
        )

    def _linear(self, modules: Sequence[str], out_features: int, in_features: int) -> AnyLinear:
        """Reads linear layers with the same input as one layer, without a bias. Each has `out_features` outputs."""
        weights = [
            placed(self._reader.linear(module, (out_features, in_features)), self._device, self._dtype)
            for module in modules
        ]
        if self._quantization is not None:
            for module in modules:
                skip_zero_bias(self._reader, module, out_features)
        return joined_linear(weights, None, self._dtype, self._kinds)

    def _shared(self, prefix: str) -> SharedWeights | None:
        shared, names = self._experts.shared, self._shapes.names
        if shared is None:
            return None
        inner, hidden = shared.intermediate_size, self._shapes.hidden_size
        modules = self._modules
        module = f"{prefix}.{names.shared}" if modules is None else f"{prefix.rpartition('.')[0]}.{modules.mlp}"
        gate_up = self._linear([f"{module}.{name}" for name in ("gate_proj", "up_proj")], inner, hidden)
        down = self._linear([f"{module}.down_proj"], hidden, inner)
        gate = self._padded(f"{prefix}.{names.shared_gate}", "shared_gate", self._dtype) if shared.has_gate else None
        return SharedWeights(DenseWeights(gate_up, down), gate)

    def _experts_of(self, prefix: str) -> Iterator[DenseWeights]:
        """Yields the experts of one layer."""
        is_apart = f"{prefix}.gate_up_proj" not in self._reader
        if is_apart and self._experts.tensors is ExpertTensors.ROWS:
            yield from (self._expert(f"{prefix}.{number}") for number in range(self._shapes.num_experts))
            return
        parts = [self._joined(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj")]
        yield from (DenseWeights(*linears) for linears in zip(*parts, strict=True))

    def _expert(self, prefix: str) -> DenseWeights:
        """Reads an expert whose linear layers stand alone."""
        inner, hidden = self._shapes.intermediate_size, self._shapes.hidden_size
        *inputs, down = self._shapes.names.projections
        gate_up = self._linear([f"{prefix}.{name}" for name in inputs], inner, hidden)
        return DenseWeights(gate_up, self._linear([f"{prefix}.{down}"], hidden, inner))

    def _joined(self, name: str) -> Sequence[AnyLinear]:
        """Reads one projection of all experts together."""
        out_features, in_features = self._shapes.gate_up if name.endswith("gate_up_proj") else self._shapes.down
        count = self._shapes.num_experts
        bias = None
        if self._experts.has_biases:
            bias = self._gates_first(name, self._read(f"{name}_bias", count, out_features))
        if self._experts.is_mxfp4:
            weights = self._read_mxfp4(name, count, out_features, in_features)
        else:
            weights = map(self._rounded, self._read_joined(name, count, out_features, in_features))
        return [
            joined_linear([weight], None if bias is None else bias[number].contiguous(), self._dtype, self._kinds)
            for number, weight in enumerate(weights)
        ]

    def _read_joined(self, name: str, count: int, out_features: int, in_features: int) -> torch.Tensor:
        """Reads one plain projection of all experts: [experts, out_features, in_features], gates first."""
        if self._experts.tensors is ExpertTensors.ROWS:
            weight = self._reader.read(name, (count, out_features, in_features)).to(self._device)
        else:
            weight = self._reader.read(name, (count, in_features, out_features)).to(self._device).transpose(1, 2)
        return self._gates_first(name, weight)

    def _gates_first(self, name: str, joined: torch.Tensor) -> torch.Tensor:
        """Returns a tensor [experts, out_features, ...] with gates before ups, if they take turns."""
        is_input = name.endswith("gate_up_proj")
        return gates_before_ups(joined, dim=1) if is_input and self._shapes.interleaves else joined

    def _rounded(self, weight: torch.Tensor) -> LinearWeight:
        """Returns a plain weight of the checkpoint: rounded if --quantization says so, else in the model's dtype."""
        quantization = self._quantization
        if quantization is not None and quantization.is_rounded:
            return rounded(weight.contiguous(), quantization.scheme)
        return weight.to(self._dtype).contiguous()

    def _read_mxfp4(self, name: str, count: int, out_features: int, in_features: int) -> Iterator[LinearWeight]:
        """Reads one projection of all experts from blocks, and yields that of each, gates first."""
        blocks = (count, out_features, in_features // MXFP4_BLOCK)
        numbers, scales = (
            self._gates_first(name, self._reader.read_bytes(f"{name}_{part}", shape).to(self._device))
            for part, shape in (("blocks", (*blocks, MXFP4_BLOCK // 2)), ("scales", blocks))
        )
        for one in zip(numbers, scales, strict=True):
            yield QuantizedWeight.of_mxfp4(*one) if self._keeps_mxfp4 else from_mxfp4(*one, self._dtype)


def gates_before_ups(joined: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a tensor in which gates and ups take turns along `dim`, with all gates first."""
    length = joined.shape[dim]
    order = torch.cat([torch.arange(0, length, 2), torch.arange(1, length, 2)])
    return joined.index_select(dim, order.to(joined.device))
