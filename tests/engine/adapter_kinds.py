"""Adapters of every kind that is served, made by peft, and their weights read from peft's own modules."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from transformers import LlamaForCausalLM

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.platform.errors import NotFound
from tests.engine.engine_driver import EngineDriver
from tests.engine.parallel.rank_threads import start_thread
from tests.engine.random_models import ALL_TARGETS

RANKS = (1, 3, 8, 12, 16, 24, 64, 128)
KINDS: dict[str, dict[str, Any]] = {
    "dora": {"r": 6, "use_dora": True},
    "dora-some": {"r": 4, "use_dora": True, "target_modules": ["k_proj", "up_proj", "o_proj"]},
    "dora-head": {"r": 4, "use_dora": True, "target_modules": ["q_proj", "lm_head"]},
    "lora-bias": {"r": 4, "lora_bias": True, "target_modules": ["q_proj", "down_proj", "gate_proj"]},
    "embedding": {"r": 5, "target_modules": ["embed_tokens", "v_proj"]},
    "head": {"r": 5, "target_modules": ["lm_head", "v_proj"]},
    "saved": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "patterns": {"r": 4, "rank_pattern": {"q_proj": 9, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"k_proj": 3}},
}


def make_peft(base: Path, seed: int, **options: Any) -> PeftModel:
    """Returns a random adapter. Each tensor differs from PEFT's initial value."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"lora_alpha": 8, "target_modules": ALL_TARGETS} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT doubts that such adapters can be merged, which nobody asks for
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**settings))
    spread = 0.3 / max(1.0, settings["r"] / 8) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.0 + 0.2 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(std=spread)
            elif "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.requires_grad_(False).train(False)


def weights_of(model: PeftModel, digest: str) -> AdapterWeights:
    """Returns the weights that PEFT's modules hold, without a file in between."""
    weights = AdapterWeights(digest, {})
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            pair = _pair(module)
            target = name.rsplit(".", 1)[-1]
            if target in ALL_TARGETS:
                parts = name.split(".")
                weights.pairs[int(parts[parts.index("layers") + 1]), target] = pair
            else:
                found["embedding" if target == "embed_tokens" else "head"] = pair
        elif isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save["default"].weight
            found["saved_embedding" if name.endswith("embed_tokens") else "saved_head"] = saved
    return AdapterWeights(digest, weights.pairs, **found)


def _pair(module: Any) -> LoraPair:
    scale = module.scaling["default"]
    if "default" in module.lora_embedding_A:
        return LoraPair(module.lora_embedding_A["default"], module.lora_embedding_B["default"], scale)
    A, B = module.lora_A["default"], module.lora_B["default"]
    magnitude = module.lora_magnitude_vector["default"].weight if "default" in module.lora_magnitude_vector else None
    return LoraPair(A.weight, B.weight, scale, magnitude, B.bias)


@dataclass
class AdapterKinds:
    """A base model with an adapter of every served kind: the PEFT models and their weights by name."""

    base: Path
    models: dict[str, torch.nn.Module]
    weights: Mapping[str, AdapterWeights]
    loads: list[str] = field(default_factory=list)

    def load(self, digest: str) -> AdapterWeights:
        self.loads.append(digest)
        if digest not in self.weights:
            raise NotFound(f"There is no adapter {digest}.")
        return self.weights[digest]

    def engine(self, **options: Any) -> EngineDriver:
        """A fresh engine in fp32 over the base model."""
        settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20} | options
        return EngineDriver(
            build_engine(EngineConfig(model=self.base, **settings), lambda _: self, start_worker=start_thread)
        )


def make_adapter_kinds(base: Path) -> AdapterKinds:
    options = {f"rank-{rank}": {"r": rank} for rank in RANKS} | KINDS
    models = {name: make_peft(base, seed, **kind) for seed, (name, kind) in enumerate(options.items(), start=100)}
    weights = {name: weights_of(model, name) for name, model in models.items()}
    plain = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False).train(False)
    return AdapterKinds(base, {"": plain, **models}, weights)
