"""Random checkpoints in the published forms, and the dense weights that their libraries compute from them.

Each form is packed and made dense here by the formulas of its own library, restated in its own order of dimensions, and
without any code of the engine. The dense weights are saved as a model for transformers and peft.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
PROJECTIONS = (
    *("qkv_proj", "gate_up_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("w1", "w2", "w3"),
    *("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"),
    *("modality_router", "prediction_coefs", "correction_coefs", "altup_projections.0", "altup_unembed_projections.0"),
)


def make_plain(folder: Path, seed: int = 0, **options: Any) -> Path:
    """A random Llama whose sizes are whole groups."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SIZES | options)).save_pretrained(folder)
    return folder


def make_joined(folder: Path) -> Path:
    """A random Phi-3, whose files hold q, k and v as one tensor, and gate and up as another."""
    torch.manual_seed(1)
    Phi3ForCausalLM(Phi3Config(**SIZES)).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Form:
    """A published form: its `quantization_config`, and how it packs one layer of (out_features, in_features)."""

    config: dict[str, Any]
    pack: Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]
    """Returns the tensors of a layer by the last part of their names, and its dense weight [out, in]."""


@dataclass
class Checkpoint:
    """A quantised checkpoint, the same weights made dense, and the dense weights of its layers by name."""

    folder: Path
    dense_folder: Path
    dense: dict[str, torch.Tensor] = field(default_factory=dict)


def write(form: Form, plain: Path, folder: Path, skip: tuple[str, ...] = ()) -> Checkpoint:
    """Writes the layers of a plain model anew as random layers of a form, but for those whose names end with `skip`."""
    generator = torch.Generator().manual_seed(7)
    made = Checkpoint(folder / "quantised", folder / "dense")
    for target in (made.folder, made.dense_folder):
        shutil.copytree(plain, target)
    stored = load_file(plain / "model.safetensors")
    dense = dict(stored)
    for name, tensor in list(stored.items()):
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or not module.endswith(PROJECTIONS) or module.endswith(skip or ("-",)):
            continue
        out_features, in_features = tensor.shape
        tensors, weight = form.pack(out_features, in_features, generator)
        del stored[name]
        stored |= {f"{module}.{last}": each.contiguous() for last, each in tensors.items()}
        dense[name] = made.dense[module] = weight.float().contiguous()
    save_file(stored, made.folder / "model.safetensors", {"format": "pt"})
    save_file(dense, made.dense_folder / "model.safetensors", {"format": "pt"})
    change_config(made.folder, quantization_config=form.config)
    return made


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def random_codes(out: int, width: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2**bits, (out, width), generator=generator, dtype=torch.int32)


def random_scales(*shape: int, bits: int, generator: torch.Generator) -> torch.Tensor:
    scales: torch.Tensor = (0.5 + torch.rand(shape, generator=generator)) * 0.6 / 2**bits
    return scales.to(torch.float16)


def packed(values: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Packs codes into 32-bit words along a dimension, one code after the other, the lowest bits first."""
    values = values.transpose(0, dim)
    rows = -(-len(values) // (32 // bits))
    words = torch.zeros(rows, values.shape[1], dtype=torch.int64)
    for index, row in enumerate(values):
        words[index // (32 // bits)] |= row.long() << (bits * (index % (32 // bits)))
    return words.to(torch.int32).transpose(0, dim)


def gptq(bits: int = 4, group: int = 32, *, desc_act: bool = False, sym: bool = False, form: str = "gptq") -> Form:
    """GPTQ as AutoGPTQ (`gptq`) and GPTQModel (`gptq_v2`) write it; the dense weight is AutoGPTQ's."""

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size = width if group == -1 else group
        g_idx = torch.arange(width, dtype=torch.int32) // size
        if desc_act:
            g_idx = g_idx[torch.randperm(width, generator=generator)]
        codes = random_codes(width, out, bits, generator)  # [in, out]
        scales = random_scales(width // size, out, bits=bits, generator=generator)
        zeros = random_codes(width // size, out, bits, generator)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
        dense = scales[g_idx.long()] * (codes - zeros[g_idx.long()])  # fp16
        stored = zeros if form == "gptq_v2" else (zeros - 1) & (2**bits - 1)
        qweight, qzeros = packed(codes, bits, 0), packed(stored, bits, 1)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}, dense.t()

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": sym}
    return Form(config | {"checkpoint_format": form, "damp_percent": 0.1, "true_sequential": True}, pack)


def awq(group: int = 32) -> Form:
    """AWQ as AutoAWQ's WQLinear_GEMM writes it; the dense weight is that of its `dequantize_gemm`."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(values: torch.Tensor) -> torch.Tensor:  # [rows, out] to [rows, out / 8]
        words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
        for column in range(words.shape[1]):
            for place in range(8):
                words[:, column] |= values[:, column * 8 + order[place]].long() << (4 * place)
        return words.to(torch.int32)

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = random_codes(width, out, 4, generator)
        zeros = random_codes(width // group, out, 4, generator)
        scales = random_scales(width // group, out, bits=4, generator=generator)
        dense = (codes - zeros.repeat_interleave(group, dim=0)).to(torch.int8) * scales.repeat_interleave(group, dim=0)
        return {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales}, dense.t()

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Form(config | {"modules_to_not_convert": None}, pack)


def _compressed(form: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "output_activations": None} | group
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": "0.12.0",
    }


def packed_integers(
    bits: int = 4, group: int | None = 32, *, symmetric: bool = True, actorder: str | None = None
) -> Form:
    """compressed-tensors' `pack-quantized`: W4A16 and W8A16, bf16 scales; the dense weight is its `_dequantize`."""

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size, middle = group or width, 2 ** (bits - 1)
        codes = random_codes(out, width, bits, generator) - middle
        scales = random_scales(out, width // size, bits=bits, generator=generator).to(torch.bfloat16)
        zeros = random_codes(out, width // size, bits, generator) - middle
        g_idx = torch.arange(width, dtype=torch.int32) // size
        g_idx = g_idx[torch.randperm(width, generator=generator)] if actorder == "group" else g_idx
        tensors = {"weight_packed": packed(codes + middle, bits, 1), "weight_scale": scales}
        tensors["weight_shape"] = torch.tensor([out, width])
        if actorder == "group":
            tensors["weight_g_idx"] = g_idx
        values = codes.to(torch.bfloat16)
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros + middle, bits, 0)
            values = values - zeros[:, g_idx.long()].to(torch.bfloat16)
        return tensors, values * scales[:, g_idx.long()]

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group, "actorder": actorder, "observer": "minmax", "observer_kwargs": {}}
    return Form(_compressed("pack-quantized", weights, input_activations=None), pack)


def integers() -> Form:
    """compressed-tensors' `int-quantized`: W8A8 with dynamic activations."""

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = (random_codes(out, width, 8, generator) - 128).to(torch.int8)
        scales = random_scales(out, 1, bits=8, generator=generator).to(torch.bfloat16)
        return {"weight": codes, "weight_scale": scales}, codes.to(torch.bfloat16) * scales

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return Form(_compressed("int-quantized", weights, input_activations=activations), pack)


def random_floats(out: int, width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(out, width, generator=generator).to(torch.float8_e4m3fn)


def compressed_float8(strategy: str = "channel") -> Form:
    """compressed-tensors' `float-quantized`: scales for each output, or one for the layer with static activations."""

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = random_floats(out, width, generator)
        rows = out if strategy == "channel" else 1
        scales = (0.2 + 0.2 * torch.rand(rows, 1, generator=generator)).to(torch.bfloat16)
        tensors = {"weight": codes, "weight_scale": scales if strategy == "channel" else scales.view(1)}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor([0.5], dtype=torch.bfloat16)
        return tensors, codes.to(torch.bfloat16) * scales

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return Form(_compressed("float-quantized", weights, input_activations=activations), pack)


def block_float8(block: tuple[int, int] = (32, 32)) -> Form:
    """Blocks of fp8 as DeepSeek and Qwen publish them, with fp32 scales; the dense weight is product in fp32."""

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = random_floats(out, width, generator)
        grid = -(-out // block[0]), -(-width // block[1])
        scales = 0.2 + 0.2 * torch.rand(grid, generator=generator)
        wide = scales.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :width]
        return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Form(config, pack)


def tensor_float8() -> Form:
    """One fp32 scale for each layer, with static activations, as AutoFP8 writes it."""

    def pack(out: int, width: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = random_floats(out, width, generator)
        scale = torch.tensor(0.3173)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.7)}, codes.float() * scale

    return Form({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, pack)


FORMS: dict[str, Form] = {
    "gptq": gptq(),
    "gptq symmetric, v2": gptq(sym=True, form="gptq_v2"),
    "gptq asymmetric, v2": gptq(form="gptq_v2"),
    "gptq desc_act": gptq(desc_act=True),
    "gptq int8, one group": gptq(bits=8, group=-1),
    "awq": awq(),
    "packed int4": packed_integers(),
    "packed int4 with zero points": packed_integers(symmetric=False),
    "packed int4, actorder": packed_integers(actorder="group"),
    "packed int8, channels": packed_integers(bits=8, group=None),
    "int8 W8A8": integers(),
    "fp8 channels": compressed_float8(),
    "fp8 tensor": compressed_float8("tensor"),
    "fp8 blocks": block_float8(),
    "fp8 tensor, static": tensor_float8(),
}
"""Every form that is read, by a name for tests."""
