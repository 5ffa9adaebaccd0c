"""Small random models and adapters, made by transformers and peft, which are the references of the engine's tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.platform.errors import NotFound

ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_base(folder: Path, seed: int = 0, num_layers: int = 2, num_heads: int = 4) -> Path:
    """A random Llama of few layers with grouped KV heads; its logits differ enough to have clear maxima."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, seed: int, **options: Any) -> Path:
    """A random LoRA adapter, saved by peft. Both factors are random, so that its delta is not zero."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS} | options
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(str(folder))
    return folder


def reference_model(base: Path, adapter: Path | None) -> torch.nn.Module:
    """The reference model in fp32: transformers alone, or with an unmerged peft adapter."""
    model: torch.nn.Module = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    return model.requires_grad_(False).train(False)


@dataclass
class FolderSource:
    """An AdapterSource over peft folders whose modules all have the same rank and scale."""

    folders: dict[str, Path]
    scale_by_digest: dict[str, float]
    loads: int = 0

    def load(self, digest: str) -> AdapterWeights:
        self.loads += 1
        if digest not in self.folders:
            raise NotFound(f"There is no adapter {digest}.")
        tensors = load_file(self.folders[digest] / "adapter_model.safetensors")
        pairs: dict[tuple[int, str], LoraPair] = {}
        for name, tensor in tensors.items():
            if name.endswith("lora_A.weight"):
                parts = name.split(".")
                target, layer = parts[-3], int(parts[parts.index("layers") + 1])
                B = tensors[name.replace("lora_A", "lora_B")]
                pairs[layer, target] = LoraPair(tensor, B, self.scale_by_digest[digest])
        return AdapterWeights(digest, pairs)
