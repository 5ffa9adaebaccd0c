"""Turns a LoRA in llama.cpp's GGUF into the two files that PEFT would have saved.

    blk.3.attn_q.weight.lora_b   [out, rank]   ──►   base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight
    adapter.lora.alpha                         ──►   lora_alpha; llama.cpp scales by alpha / rank, and by 1 for alpha 0

Owns llama.cpp's names, and what its converter did to the numbers: for some architectures it reorders the rows of q and k
within each head, so that they suit another form of the rotary embedding, and it transposes A of the embedding. Both are
undone here, so the bits are those of the PEFT folder that was converted without rounding. Never checks that a model has the
modules: `layout.py` does, with the result.
Source: convert_lora_to_gguf.py and src/llama-adapter.cpp of https://github.com/ggml-org/llama.cpp.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graftwork.adapters.format.gguf_file import GgufFile, GgufTensor, read_gguf, refused_gguf
from graftwork.adapters.format.safetensors_file import FORMATS, Readable
from graftwork.adapters.format.specs import shown
from graftwork.adapters.format.unsupported import unserved
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed

Bits = npt.NDArray[Any]

_REORDERED = ("granite", "llama", "smollm3")
"""The architectures whose q and k llama.cpp reorders. Mistral's is `llama`, too."""
_AS_THEY_ARE = ("gemma2", "gemma3", "phi3", "qwen2", "qwen3")
_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_UP = "phi3"
"""In this architecture, `ffn_up` is the fused gate_up_proj."""
_NAME = re.compile(
    r"(?:blk\.(?P<layer>0|[1-9][0-9]{0,3})\.(?P<part>[a-z_]{1,32})|(?P<rest>token_embd|output))\.weight\.lora_(?P<factor>[ab])"
)
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class PeftTensor:
    """A tensor of the safetensors file, and the one of the GGUF file from which it is made."""

    name: str
    source: GgufTensor
    shape: tuple[int, int]
    convert: Callable[[Bits], Bits] | None = None
    """Makes it from the bits of the other; None copies them."""

    def data(self, content: Readable) -> Bits:
        """Returns the bits of the elements as unsigned integers, in their order."""
        number, bits = math.prod(self.shape), FORMATS[self.source.dtype].numpy_bits
        found = np.frombuffer(content, dtype=bits, count=number, offset=self.source.start).reshape(self.source.shape)
        return np.ascontiguousarray(found if self.convert is None else self.convert(found))


@dataclass(frozen=True, slots=True)
class PeftFiles:
    """What PEFT would have saved: the configuration, and the tensors of the weights file."""

    config: bytes
    tensors: tuple[PeftTensor, ...]

    def weights(self, content: Readable) -> Iterator[bytes | memoryview]:
        """Yields the safetensors file piece by piece. `content` is the GGUF file."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            start, end = end, end + math.prod(tensor.shape) * FORMATS[tensor.source.dtype].item_bytes
            header[tensor.name] = {"dtype": tensor.source.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        yield len(raw).to_bytes(8, "little") + raw
        for tensor in self.tensors:
            yield tensor.data(content).data.cast("B")


def peft_files(content: Readable, description: EngineDescription) -> PeftFiles:
    """Reads a LoRA in a GGUF file. Raises ValidationFailed for one that is not served, with the tensor or field at fault."""
    file = read_gguf(content)
    architecture = _check_metadata(file)
    tensors = [_peft_tensor(tensor, architecture, description.head_dim) for tensor in file.tensors]
    ranks = {_module(tensor.name): tensor.shape[0] for tensor in tensors if ".lora_A." in tensor.name}
    ranks |= {_module(tensor.name): tensor.shape[0] for tensor in tensors if tensor.name.endswith("lora_embedding_A")}
    if not ranks:
        raise refused_gguf("the file holds no lora_a.")
    return PeftFiles(_config(file, ranks), tuple(tensors))


def _check_metadata(file: GgufFile) -> str:
    """Returns the architecture. Raises ValidationFailed for what is no LoRA of an architecture that is known here."""
    kinds = (file.metadata.get("general.type"), file.metadata.get("adapter.type"))
    if kinds != ("adapter", "lora"):
        said = f"general.type {shown(str(kinds[0]))} and adapter.type {shown(str(kinds[1]))}"
        raise refused_gguf(f"it has {said}, so it is no LoRA: convert one with llama.cpp's convert_lora_to_gguf.py.")
    if file.array_lengths.get("adapter.alora.invocation_tokens"):
        raise unserved("weights", "aLoRA, active only behind its invocation tokens")
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in _REORDERED + _AS_THEY_ARE:
        known = ", ".join(sorted(_REORDERED + _AS_THEY_ARE))
        raise refused_gguf(
            f"GGUF of the architecture {shown(architecture)} is not read ({known} are): push the PEFT folder."
        )
    return architecture


def _peft_tensor(tensor: GgufTensor, architecture: str, head_dim: int | None) -> PeftTensor:
    matched = _NAME.fullmatch(tensor.name)
    if matched is None:
        raise refused_gguf("not the name of a LoRA tensor that is served, so it would not be applied.", tensor.name)
    if len(tensor.shape) != 2:
        raise refused_gguf(f"its shape {list(tensor.shape)} is no matrix.", tensor.name)
    rows, columns = tensor.shape
    if matched["rest"] == "token_embd":
        name = f"{_PREFIX}model.embed_tokens.lora_embedding_{matched['factor'].upper()}"
        if matched["factor"] == "a":
            return PeftTensor(name, tensor, (columns, rows), np.transpose)
        return PeftTensor(name, tensor, (rows, columns))
    factor = f"lora_{matched['factor'].upper()}.weight"
    if matched["rest"] == "output":
        return PeftTensor(f"{_PREFIX}lm_head.{factor}", tensor, (rows, columns))
    part = matched["part"]
    module = "mlp.gate_up_proj" if (part, architecture) == ("ffn_up", _FUSED_UP) else _MODULES.get(part)
    if module is None:
        raise refused_gguf("LoRA on this module is not read from GGUF: push the PEFT folder.", tensor.name)
    name = f"{_PREFIX}model.layers.{matched['layer']}.{module}.{factor}"
    if part in ("attn_q", "attn_k") and matched["factor"] == "b" and architecture in _REORDERED:
        return PeftTensor(name, tensor, (rows, columns), _in_order_of(tensor, head_dim))
    return PeftTensor(name, tensor, (rows, columns))


def _in_order_of(tensor: GgufTensor, head_dim: int | None) -> Callable[[Bits], Bits]:
    """Returns what puts the rows of q and k back: [heads, head_dim / 2, 2] to [heads, 2, head_dim / 2]."""
    if head_dim is None:
        message = f"{tensor.name}: the engine does not say the size of its heads, which GGUF needs: upgrade the engine."
        raise ValidationFailed(message, param="weights", code="unsupported_feature")
    rows, columns = tensor.shape
    if rows % head_dim or head_dim % 2:
        raise refused_gguf(f"{rows} rows are no whole number of heads of {head_dim}.", tensor.name)

    def reorder(bits: Bits) -> Bits:
        heads = bits.reshape(rows // head_dim, head_dim // 2, 2, columns)
        return heads.swapaxes(1, 2).reshape(rows, columns)

    return reorder


def _module(name: str) -> str:
    return name.removeprefix(_PREFIX).partition(".lora_")[0]


def _config(file: GgufFile, ranks: dict[str, int]) -> bytes:
    """Returns adapter_config.json. `ranks` has the rank of each module."""
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha < 0:
        raise refused_gguf("adapter.lora.alpha is no number from 0 up.")
    r = max(ranks.values())
    others = {module: rank for module, rank in ranks.items() if rank != r}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": r,
        "lora_alpha": float(alpha or r),
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
        "rank_pattern": others,
        "alpha_pattern": {} if alpha else others,
    }
    return json.dumps(config).encode()
