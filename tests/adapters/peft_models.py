"""Small random models with adapters that peft itself made, saved and reads."""

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.utils import ModulesToSaveWrapper
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.adapters.adapter_files import DESCRIPTION

Family = Literal["llama", "qwen2"]
BIASED = {"llama": (), "qwen2": ("q_proj", "k_proj", "v_proj")}


def base_model(family: Family = "llama") -> PreTrainedModel:
    """Returns the model that `DESCRIPTION` describes."""
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=DESCRIPTION.vocab_size,
        hidden_size=DESCRIPTION.hidden_size,
        intermediate_size=48,
        num_hidden_layers=DESCRIPTION.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: PreTrainedModel = model_class(config)
    return model


def save_adapter(
    folder: Path, options: dict[str, Any], family: Family = "llama", dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Saves an adapter of random tensors with `save_pretrained`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what the options ask for on purpose
        model = get_peft_model(base_model(family), LoraConfig(task_type="CAUSAL_LM", **options))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad or "lora_" in name:
                    parameter.data = torch.randn_like(parameter).to(dtype)
        model.save_pretrained(str(folder))


def read_back(folder: Path, family: Family = "llama") -> PeftModel:
    """Returns the folder as peft loads it onto a new base model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PeftModel = PeftModel.from_pretrained(base_model(family), folder)
    return model


Place = tuple[int | None, str]
Matrices = dict[str, Any]
"""Tensors, and the scale."""


def lora_of(model: PeftModel) -> dict[Place, Matrices]:
    """Returns peft's matrices and scale of every module with LoRA."""
    found: dict[Place, Matrices] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            matrices: Matrices = {
                "A": module.lora_A["default"].weight,
                "B": module.lora_B["default"].weight,
                "scale": module.scaling["default"],
            }
            if module.lora_B["default"].bias is not None:
                matrices["bias"] = module.lora_B["default"].bias
            if "default" in module.lora_magnitude_vector:
                matrices["magnitude"] = module.lora_magnitude_vector["default"].weight
            found[place_of(name)] = matrices
        elif isinstance(module, LoraEmbedding):
            found[place_of(name)] = {
                "A": module.lora_embedding_A["default"],
                "B": module.lora_embedding_B["default"],
                "scale": module.scaling["default"],
            }
    return found


def replaced_in(model: PeftModel, family: Family) -> tuple[dict[Place, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the biases and whole matrices in which the loaded model differs from its base."""
    base = dict(base_model(family).named_parameters())
    biases: dict[Place, torch.Tensor] = {}
    saved: dict[str, torch.Tensor] = {}
    for name, parameter in base.items():
        module = name.rpartition(".")[0]
        now = effective(model, module, name.rpartition(".")[2])
        if not torch.equal(now.float(), parameter.float()):
            place = place_of(module)
            if name.endswith(".bias"):
                biases[place] = now
            else:
                saved[place[1]] = now
    return biases, saved


def effective(model: PeftModel, module_name: str, attribute: str) -> torch.Tensor:
    """Returns the parameter that the forward pass reads for a module of the base."""
    module = model.get_base_model().get_submodule(module_name)
    if isinstance(module, ModulesToSaveWrapper):
        module = module.modules_to_save["default"]
    if isinstance(module, LoraLinear | LoraEmbedding):
        module = module.get_base_layer()
    found: torch.Tensor = getattr(module, attribute).detach()
    return found


def place_of(name: str) -> Place:
    parts = name.split(".")
    layer = int(parts[parts.index("layers") + 1]) if "layers" in parts else None
    return layer, parts[-1]
