"""Reads the quantised weight of one linear layer from a checkpoint, in the form in which its library has written it.

Owns the layouts of GPTQ, AWQ, compressed-tensors and fp8. Never looks at config.json: `Scheme` says what to expect.
Invariant: a tensor that is missing, or has another shape or dtype than the scheme says, is an error that names it.

Integers of 4 or 8 bits are packed into 32-bit words, the lowest bits first:

    GPTQ                 qweight [in / pack, out]      word w of a column has the input features w * pack …
    AWQ                  qweight [in, out / pack]      nibble i of a word has the output _AWQ_ORDER[i] of its eight
    compressed-tensors   weight_packed [out, in / pack], zero points [out / pack, groups]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from graftwork.engine.quantization.scheme import Method, Scheme
from graftwork.engine.quantization.weight import WHOLE_ROW, Codes, QuantizedWeight
from graftwork.platform.errors import InvalidRequest

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class StoredTensors(Protocol):
    """The tensors of a checkpoint, as they are stored."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str) -> torch.Tensor:
        """Returns a whole tensor in the dtype of its file."""
        ...


def read_quantized(tensors: StoredTensors, module: str, shape: tuple[int, int], scheme: Scheme) -> QuantizedWeight:
    """Reads the weight of one linear layer, such as "model.layers.0.mlp.down_proj".

    `shape` is (out_features, in_features). Raises InvalidRequest if the tensors do not fit the scheme.
    """
    group = scheme.group_size
    if group is not None and shape[1] % group and scheme.block is None:
        raise _wrong(f"group_size {group} does not divide the {shape[1]} input features of {module}")
    return _READERS[scheme.method](_Module(tensors, module, *shape, scheme))


@dataclass(frozen=True, slots=True)
class _Module:
    """One linear layer in a checkpoint."""

    tensors: StoredTensors
    name: str
    out_features: int
    in_features: int
    scheme: Scheme

    @property
    def groups(self) -> int:
        group = self.scheme.group_size
        return 1 if group is None else -(-self.in_features // group)

    @property
    def group_size(self) -> int:
        return self.scheme.group_size or WHOLE_ROW

    @property
    def pack(self) -> int:
        """The codes in a 32-bit word."""
        return 32 // self.scheme.bits

    @property
    def kind(self) -> Codes:
        return Codes.INT4 if self.scheme.bits == 4 else Codes.INT8

    @property
    def middle(self) -> int:
        """The code that stands for 0 where codes have no sign."""
        return 1 << (self.scheme.bits - 1)

    def has(self, last: str) -> bool:
        return f"{self.name}.{last}" in self.tensors

    def take(self, last: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> torch.Tensor:
        """Reads a tensor of the layer that must have one of some dtypes and shapes."""
        name = f"{self.name}.{last}"
        if name not in self.tensors:
            raise _wrong(f"the checkpoint has no tensor {name!r}")
        tensor = self.tensors.take(name)
        if tuple(tensor.shape) not in shapes:
            raise _wrong(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {' or '.join(map(str, shapes))}")
        if tensor.dtype not in dtypes:
            raise _wrong(f"tensor {name!r} is of {tensor.dtype}, not {' or '.join(map(str, dtypes))}")
        return tensor

    def scales(self, last: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Reads scales, which must be finite."""
        scales = self.take(last, _FLOATS, *shapes)
        if not bool(torch.isfinite(scales).all()):
            raise _wrong(f"tensor '{self.name}.{last}' has a scale that is infinite or no number")
        return scales

    def order(self, last: str) -> torch.Tensor | None:
        """Reads which group each input feature belongs to. Returns the features sorted by groups; None if they are."""
        if not self.has(last):
            if self.scheme.has_order:
                raise _wrong(f"the checkpoint has no tensor '{self.name}.{last}'")
            return None
        groups = self.take(last, (torch.int32, torch.int64), (self.in_features,)).long()
        if bool((groups == -1).all()):  # as compressed-tensors writes what it has not filled
            return None
        size = self.scheme.group_size or self.in_features
        sorted_groups, order = torch.sort(groups, stable=True)
        if not torch.equal(sorted_groups, torch.arange(self.in_features) // size):
            raise _wrong(f"tensor '{self.name}.{last}' does not give each group {size} input features")
        return None if torch.equal(sorted_groups, groups) else order


def _wrong(problem: str) -> InvalidRequest:
    return InvalidRequest(f"{problem}: config.json's quantization_config and the checkpoint do not fit.", param="model")


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of words along the last dimension, from 0 on: [rows, words * codes in a word] int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _ordered(codes: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return codes if order is None else codes[:, order]


def _read_gptq(module: _Module) -> QuantizedWeight:
    out_features, in_features, pack, bits = module.out_features, module.in_features, module.pack, module.scheme.bits
    if in_features % pack or out_features % pack:
        raise _wrong(f"{module.name} has {out_features} × {in_features} features, no multiples of {pack}")
    words = module.take("qweight", (torch.int32,), (in_features // pack, out_features))
    codes = _unpacked(words.t(), bits) - module.middle  # [out, in]
    stored = _unpacked(module.take("qzeros", (torch.int32,), (module.groups, out_features // pack)), bits)
    zeros = ((stored + module.scheme.zero_offset) & ((1 << bits) - 1)).t() - module.middle
    scales = module.scales("scales", (module.groups, out_features)).t()
    order = module.order("g_idx")
    codes = _ordered(codes, order).to(torch.int8)
    return QuantizedWeight.of(codes, scales, zeros, kind=module.kind, group_size=module.group_size, order=order)


def _read_awq(module: _Module) -> QuantizedWeight:
    out_features, in_features, pack = module.out_features, module.in_features, module.pack
    if out_features % pack:
        raise _wrong(f"{module.name} has {out_features} outputs, no multiple of {pack}")

    def columns(words: torch.Tensor) -> torch.Tensor:  # [rows, out / pack] to [out, rows]
        nibbles = _unpacked(words, 4).view(len(words), -1, pack)
        outputs = torch.empty_like(nibbles)
        outputs[:, :, list(_AWQ_ORDER)] = nibbles
        return outputs.flatten(1).t() - module.middle

    codes = columns(module.take("qweight", (torch.int32,), (in_features, out_features // pack)))
    zeros = columns(module.take("qzeros", (torch.int32,), (module.groups, out_features // pack)))
    scales = module.scales("scales", (module.groups, out_features)).t()
    return QuantizedWeight.of(
        codes.to(torch.int8).contiguous(), scales, zeros, kind=Codes.INT4, group_size=module.group_size
    )


def _scales_by_output(module: _Module, last: str) -> torch.Tensor:
    """Reads scales for groups, outputs or the whole layer. Returns [out_features, groups]."""
    out_features, groups, block = module.out_features, module.groups, module.scheme.block
    if block is not None:
        rows = -(-out_features // block[0])
        return module.scales(last, (rows, groups)).repeat_interleave(block[0], dim=0)[:out_features]
    if module.scheme.group_size is not None:
        return module.scales(last, (out_features, groups))
    scales = module.scales(last, (), (1,), (1, 1), (out_features,), (out_features, 1))
    return scales.reshape(-1, 1).expand(out_features, 1)


def _read_packed(module: _Module) -> QuantizedWeight:
    out_features, in_features, bits = module.out_features, module.in_features, module.scheme.bits
    words = module.take("weight_packed", (torch.int32,), (out_features, -(-in_features // module.pack)))
    if module.has("weight_shape"):
        shape = module.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
        if shape != [out_features, in_features]:
            raise _wrong(f"'{module.name}.weight_shape' is {shape}, not {[out_features, in_features]}")
    codes = _unpacked(words, bits)[:, :in_features] - module.middle
    scales, zeros = _scales_by_output(module, "weight_scale"), None
    if not module.scheme.is_symmetric:
        packed = module.take("weight_zero_point", (torch.int32,), (-(-out_features // module.pack), module.groups))
        zeros = _unpacked(packed.t(), bits)[:, :out_features].t() - module.middle
    order = module.order("weight_g_idx")
    codes = _ordered(codes, order).to(torch.int8).contiguous()
    return QuantizedWeight.of(codes, scales, zeros, kind=module.kind, group_size=module.group_size, order=order)


def _read_integers(module: _Module) -> QuantizedWeight:
    codes = module.take("weight", (torch.int8,), (module.out_features, module.in_features))
    scales, zeros = _scales_by_output(module, "weight_scale"), None
    if module.has("weight_zero_point") or not module.scheme.is_symmetric:
        shapes = ((module.out_features, module.groups), (1,), (module.out_features,))
        zeros = module.take("weight_zero_point", (torch.int8,), *shapes)
        zeros = zeros.reshape(-1, module.groups).expand(module.out_features, module.groups)
    return QuantizedWeight.of(codes, scales, zeros, kind=Codes.INT8, group_size=module.group_size)


def _read_float8(module: _Module) -> QuantizedWeight:
    codes = module.take("weight", (torch.float8_e4m3fn,), (module.out_features, module.in_features))
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise _wrong(f"tensor '{module.name}.weight' has a value that is no number")
    scales = _scales_by_output(module, module.scheme.scale_name)
    return QuantizedWeight.of(codes, scales, kind=Codes.FLOAT8, group_size=module.group_size)


_READERS: Mapping[Method, Callable[[_Module], QuantizedWeight]] = {
    Method.GPTQ: _read_gptq,
    Method.AWQ: _read_awq,
    Method.COMPRESSED_INTEGERS: _read_packed,
    Method.INTEGERS: _read_integers,
    Method.FLOAT8: _read_float8,
}
