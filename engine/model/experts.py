"""Describes the routed layers of a model, as data: how the router chooses experts, and what an expert computes.

    scores  = score(router(x))                              over all experts, fp32
    chosen  = the `num_chosen` experts with the highest scores (+ correction), of the best groups alone
    weights = scores of the chosen, summing to 1 if `normalises`, times `scale`
    y       = sum of weights * down(activation(gate_up(x))) over the chosen experts
    y      += sigmoid(shared_gate(x)) * shared(x)           where there is a shared expert, and a gate of it

Never imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from graftwork.engine.core.expert_shapes import LLAMA_EXPERTS, ExpertNames, ExpertShapes

MXFP4_BLOCK = 32
"""The numbers of a row that have one power of two in common, in a checkpoint of MXFP4."""


class RouterScore(Enum):
    """How the router's logits become scores."""

    SOFTMAX = auto()
    """Probabilities over all experts."""
    SOFTMAX_OF_CHOSEN = auto()
    """The logits choose; the weights are probabilities over the chosen experts alone."""
    SIGMOID = auto()
    """Each expert's sigmoid. The router multiplies in fp32, and a learned correction takes part in the choice alone."""


class RoutedLayers(Enum):
    """Says which layers are routed."""

    EVERY_LAYER = auto()
    BY_STEP = auto()
    """Each `decoder_sparse_step`th layer, but not those of `mlp_only_layers`."""
    AFTER_FIRST = auto()
    """All layers but the first `first_k_dense_replace`."""
    EVERY_LAYER_IF_ANY = auto()
    """All layers, unless the number of experts is 0."""


class ExpertTensors(Enum):
    """How a checkpoint holds joined tensors of all experts, where it has no tensor for each expert alone."""

    ROWS = auto()
    """[experts, out_features, in_features], gates before ups."""
    INTERLEAVED_COLUMNS = auto()
    """[experts, in_features, out_features]; gates and ups take turns."""


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """An activation: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`, and up within +- `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that sees every token."""

    intermediate_size: int
    has_gate: bool
    """Whether its output is multiplied by the sigmoid of a gate of its own."""


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How the router of each routed layer chooses."""

    score: RouterScore
    num_chosen: int
    normalises: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    num_groups: int = 1
    """Experts are in so many groups; only the best `num_chosen_groups` of them can be chosen."""
    num_chosen_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sizes and settings of a model's routed layers."""

    shapes: ExpertShapes
    router: RouterSpec
    tensors: ExpertTensors = ExpertTensors.ROWS
    has_biases: bool = False
    """Whether the router and the experts' projections have biases."""
    shared: SharedExpert | None = None
    clamped: ClampedSwiGlu | None = None
    """The experts' activation; None means that of the model."""
    is_mxfp4: bool = False
    """Whether the checkpoint holds the experts' projections as MXFP4."""
    file_names: Mapping[str, str] = field(default_factory=dict)
    """By the end of a tensor's name in files, the end that it is read by."""

    @property
    def target_shapes(self) -> dict[str, tuple[int, int]]:
        """The pair (out_features, in_features) of each linear layer of a routed layer, besides those of its experts."""
        hidden = self.shapes.hidden_size
        found = {"router": (self.shapes.num_experts, hidden)}
        if self.shared is not None:
            inner = self.shared.intermediate_size
            found |= {"shared_gate_proj": (inner, hidden), "shared_up_proj": (inner, hidden)}
            found |= {"shared_down_proj": (hidden, inner)}
            found |= {"shared_gate": (1, hidden)} if self.shared.has_gate else {}
        return found

    @property
    def checkpoint_names(self) -> dict[str, str]:
        """By target, the module's name within the MLP of a layer."""
        names = self.shapes.names
        inside = {f"shared_{part}": f"{names.shared}.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
        return {"router": names.router, "shared_gate": names.shared_gate} | inside


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """How an architecture describes its routed layers in config.json. Fields that end in `setting` name a setting."""

    count_settings: tuple[str, ...]
    """The names that the number of experts may have."""
    size_setting: str
    layers: RoutedLayers
    score: RouterScore
    normalises: bool | str = True
    """Whether weights are divided by their sum, or the setting that says so."""
    has_groups: bool = False
    """Whether `n_group`, `topk_group` and `routed_scaling_factor` are read."""
    has_biases: bool = False
    is_clamped: bool = False
    """Whether the experts have the clamped activation of `swiglu_alpha` and `swiglu_limit`."""
    shared_size_setting: str | None = None
    shared_count_setting: str | None = None
    """The shared expert is so many times as wide as an expert. Only one of the two is given."""
    has_shared_gate: bool = False
    tensors: ExpertTensors = ExpertTensors.ROWS
    names: ExpertNames = LLAMA_EXPERTS
    may_be_mxfp4: bool = False
    file_names: Mapping[str, str] = field(default_factory=dict)
    """By the end of a tensor's name in published files, the end of its name in transformers."""

    @property
    def settings(self) -> frozenset[str]:
        """The names of all settings that are read."""
        optional = (self.shared_size_setting, self.shared_count_setting)
        found = {*self.count_settings, self.size_setting, "num_experts_per_tok", *_OF_LAYERS[self.layers]}
        found |= {name for name in optional if name is not None}
        found |= {self.normalises} if isinstance(self.normalises, str) else set()
        found |= {"n_group", "topk_group", "routed_scaling_factor"} if self.has_groups else set()
        found |= {"swiglu_alpha", "swiglu_limit"} if self.is_clamped else set()
        return frozenset(found | ({"quantization_config"} if self.may_be_mxfp4 else set()))


_OF_LAYERS: Mapping[RoutedLayers, tuple[str, ...]] = {
    RoutedLayers.EVERY_LAYER: (),
    RoutedLayers.EVERY_LAYER_IF_ANY: (),
    RoutedLayers.BY_STEP: ("decoder_sparse_step", "mlp_only_layers"),
    RoutedLayers.AFTER_FIRST: ("first_k_dense_replace",),
}
