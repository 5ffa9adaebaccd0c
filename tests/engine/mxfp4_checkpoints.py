"""Random checkpoints of gpt-oss whose experts are MXFP4, and the same weights in plain form, as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.engine.families import randomise

Tensors = dict[str, torch.Tensor]
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
BLOCK = 32


def make_mxfp4(folder: Path, config: GptOssConfig, *, least_power: int = 120) -> tuple[Path, Path]:
    """Writes a model twice, plain and with experts in MXFP4. Returns both folders.

    The scales of blocks are 2 ** (least_power - 127) and up to 512 times as large.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomise(model, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(5)
    packed, plain = Tensors(), Tensors()
    hidden, inner = config.hidden_size, config.intermediate_size
    for layer in range(config.num_hidden_layers):
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            sizes = (config.num_local_experts, rows, columns // BLOCK)
            blocks = torch.randint(0, 256, (*sizes, BLOCK // 2), generator=generator, dtype=torch.uint8)
            scales = torch.randint(least_power, least_power + 10, sizes, generator=generator, dtype=torch.uint8)
            full = f"model.layers.{layer}.mlp.experts.{name}"
            packed |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            plain[full] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    folders = folder / "plain", folder / "packed"
    for target, experts in zip(folders, (plain, packed), strict=True):
        model.save_pretrained(target)
        replace_experts(target, experts)
    path = folders[1] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": SETTINGS}))
    return folders


def replace_experts(folder: Path, experts: Tensors) -> None:
    """Puts other tensors in the place of a saved model's experts."""
    found = load_file(folder / "model.safetensors")
    for name in [name for name in found if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        del found[name]
    found |= experts
    save_file({name: one.contiguous() for name, one in found.items()}, folder / "model.safetensors", {"format": "pt"})
