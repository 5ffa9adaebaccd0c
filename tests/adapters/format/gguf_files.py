"""LoRA in GGUF files, written by llama.cpp's own package as its converter writes them."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = {"q_proj": 4, "k_proj": 2}
"""The heads of q and k of the tests' model."""
Matrix = npt.NDArray[Any]


def converted(peft: Mapping[str, Matrix], architecture: str = "llama") -> dict[str, Matrix]:
    """What convert_lora_to_gguf.py makes of the tensors of a PEFT file."""
    found: dict[str, Matrix] = {}
    for name, tensor in peft.items():
        module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
        letter = re.sub(r"^(embedding_)?([AB]).*", r"\2", factor).lower()
        if module == "model.embed_tokens":
            found[f"token_embd.weight.lora_{letter}"] = tensor.T if letter == "a" else tensor
        elif module == "lm_head":
            found[f"output.weight.lora_{letter}"] = tensor
        else:
            _, _, layer, own = module.split(".", 3)
            target = own.rpartition(".")[2]
            reorders = architecture == "llama" and letter == "b" and target in HEADS
            found[f"blk.{layer}.{NAMES[own]}.weight.lora_{letter}"] = (
                permute(tensor, HEADS[target]) if reorders else tensor
            )
    return found


def permute(weights: Matrix, num_heads: int) -> Matrix:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    rows = weights.shape[0]
    heads = weights.reshape(num_heads, 2, rows // num_heads // 2, *weights.shape[1:])
    return heads.swapaxes(1, 2).reshape(weights.shape)


def gguf_bytes(
    tensors: Mapping[str, Matrix],
    alpha: float = 8.0,
    architecture: str = "llama",
    *,
    kind: str = "adapter",
    invocation: list[int] | None = None,
    quantised: bool = False,
) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lora.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_type(kind)
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", alpha)
        writer.add_array("general.tags", ["lora", "test"])
        if invocation is not None:
            writer.add_array("adapter.alora.invocation_tokens", invocation)
        for name, tensor in tensors.items():
            if quantised:
                kind_of = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quants.quantize(tensor, kind_of), raw_dtype=kind_of)
            else:
                writer.add_tensor(name, np.ascontiguousarray(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()
