"""Computes a linear layer whose weights are quantised, in the place of a layer with plain weights.

A layer has parts, one for each projection that shares its input, such as q, k and v. Each part has a quantised weight or
a plain one, because a checkpoint may leave some layers as they were.

On a CPU there are two ways. The compiled kernel reads the codes themselves, which suits decoding rows. Prompts have many
rows, for which a few outputs of the weight are made dense at a time and multiplied as plain ones are. The two round
differently, so which of them serves a row follows from the row's own request alone: decoding rows (a single known token,
and drafts) take the kernel. Where the kernel does not work, all rows take the second way.

On a GPU, kernels compute all rows, those of prompts too, once the engine has chosen them (`take_kernels`, see
build/weights.py). Without them all rows take the second way.

Invariant: the bits of a row that a kernel computes do not depend on the other rows. Those of other rows depend on them no
more than with plain weights (see BatchInvariance).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from graftwork.engine.quantization.weight import Codes, QuantizedWeight

if TYPE_CHECKING:
    from graftwork.engine.quantization.cpu_products import CpuProducts

_log = logging.getLogger(__name__)

LinearWeight = torch.Tensor | QuantizedWeight
"""The weight of a projection: [out_features, in_features]."""

_DENSE_VALUES = 2**22
"""The most values of a weight that are dense at a time: 8 MiB in bf16."""
_LEAST_ROWS, _LEAST_COLUMNS = 16, 16
"""Smaller products in fp32 are computed in another way, with other bits (measured with torch 2.13 on x86)."""


@dataclass(slots=True)
class StepKinds:
    """Which rows of the current step decode. All layers of a model share it, and the decoder sets it for each step."""

    prompt_rows: Sequence[range] = ()
    """The rows that belong to prompts, ascending. All other rows decode."""

    def are_prompts(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether each of some rows of the step belongs to a prompt."""
        found = np.zeros(len(rows), np.bool_)
        for prompt in self.prompt_rows:
            found |= (rows >= prompt.start) & (rows < prompt.stop)
        return found


class DeviceProducts(Protocol):
    """The products of one weight by kernels of a GPU."""

    rounds_rows: ClassVar[bool]
    """Whether the rows of x are rounded too."""

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, as the kernels read it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes besides those of the weight."""
        ...

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
        """Writes x @ W.T + bias to y, [num_rows, out_features], for x [num_rows, in_features]."""
        ...


class QuantizedLinear:
    """A linear layer: x @ weight.T + bias, for an input x of [num_rows, in_features]."""

    __slots__ = ("_has_kernels", "_kinds", "_parts", "_rows_at_once", "bias", "dtype")

    def __init__(
        self,
        weights: Sequence[LinearWeight],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        kinds: StepKinds,
    ) -> None:
        """`dtype` is the model's. All weights are on the model's device."""
        self.bias = bias
        self.dtype = dtype
        self._rows_at_once: int | None = None
        self._kinds = kinds
        self._has_kernels = False
        self._parts = [_part(weight, dtype) for weight in weights]

    @property
    def quantized(self) -> list[QuantizedWeight]:
        """The quantised weights of its parts, as they are stored."""
        return [part.weight for part in self._parts if isinstance(part.weight, QuantizedWeight)]

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of a GPU compute all rows of all quantised parts."""
        return self._has_kernels

    @property
    def kernels(self) -> "list[DeviceProducts]":
        """The products of its parts by kernels of a GPU. Plain parts have none."""
        return [part.kernels for part in self._parts if part.kernels is not None]

    def take_kernels(self, products: Callable[[QuantizedWeight], DeviceProducts]) -> None:
        """Lets kernels of a GPU compute the layer. Joins adjacent parts of one form, so that one launch computes them."""
        parts: list[_Part] = []
        for is_quantized, run in groupby(self._parts, key=lambda part: isinstance(part.weight, QuantizedWeight)):
            if not is_quantized:
                parts += run
                continue
            weights = [part.weight for part in run if isinstance(part.weight, QuantizedWeight)]
            joined = QuantizedWeight.joined(weights)
            made = map(products, weights if joined is None else [joined])
            parts += [_Part(one.weight, self.dtype, None, one) for one in made]
        self._parts, self._has_kernels = parts, True

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight, [out_features, in_features], as a copy."""
        return torch.cat([part.dense(0, part.out_features) for part in self._parts])

    @property
    def is_packed(self) -> bool:
        """Never: plain parts stay plain, because they are computed as the dense pieces of the others are."""
        return False

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        first = self._parts[0].weight
        return first.device if isinstance(first, torch.Tensor) else first.packed.device

    @property
    def in_features(self) -> int:
        return self._parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, zero points, plain weights and the bias."""
        return sum(part.num_bytes for part in self._parts) + (0 if self.bias is None else self.bias.nbytes)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Returns False: no tensor is the weight itself."""
        return False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [num_rows, out_features] in the model's dtype for x [num_rows, in_features], the rows of the step."""
        return self._product(x, self._kinds.prompt_rows)

    def of_some(self, x: torch.Tensor, are_prompts: NDArray[np.bool_]) -> torch.Tensor:
        """Returns [num_rows, out_features] for rows that are not those of the step: `are_prompts` says which of them belong
        to prompts, [num_rows] on the host.
        """
        if self.has_kernels:
            return self._product(x, ())
        num_decoding = int(np.count_nonzero(~are_prompts))
        prompts = (range(num_decoding, len(x)),)
        if num_decoding in (0, len(x)):
            return self._product(x, prompts)
        order = torch.from_numpy(np.argsort(are_prompts, kind="stable")).to(x.device)
        y = x.new_empty(len(x), self.out_features)
        return y.index_copy_(0, order, self._product(x.index_select(0, order), prompts))

    def _product(self, x: torch.Tensor, prompt_rows: Sequence[range]) -> torch.Tensor:
        y = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        start = 0
        for part in self._parts:
            end = start + part.out_features
            bias = None if self.bias is None else self.bias[start:end]
            self._fill(part, x, bias, y[:, start:end], prompt_rows)
            start = end
        return y

    def _fill(
        self,
        part: "_Part",
        x: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        prompt_rows: Sequence[range],
    ) -> None:
        """Writes the products of one part to y, [num_rows, out_features of the part]."""
        if part.kernels is not None:
            part.kernels.multiply(x, bias, y)
            return
        if part.products is None:
            y.copy_(_dense_product(part, x, bias, self._rows_at_once))
            return
        decoding_start = 0
        for prompt in (*prompt_rows, range(len(x), len(x))):
            if decoding_start < prompt.start:
                exact = part.products.multiply(x[decoding_start : prompt.start])
                y[decoding_start : prompt.start] = exact if bias is None else exact + bias
            if prompt:
                y[prompt.start : prompt.stop] = _dense_product(
                    part, x[prompt.start : prompt.stop], bias, self._rows_at_once
                )
            decoding_start = prompt.stop

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the dense weight and the bias of the outputs [start, end). The weight is [end - start, in_features]."""
        pieces, first = [], 0
        for part in self._parts:
            low, high = max(start - first, 0), min(end - first, part.out_features)
            if low < high:
                pieces.append(part.dense(low, high))
            first += part.out_features
        return torch.cat(pieces), None if self.bias is None else self.bias[start:end]

    def limit_rows(self, rows_at_once: int | None) -> None:
        """Makes each product with dense weights have at most so many rows (see BatchInvariance)."""
        self._rows_at_once = rows_at_once

    def pack(self) -> None:
        """Does nothing: codes are packed already."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The weight of one projection, quantised or plain."""

    weight: LinearWeight
    dtype: torch.dtype
    products: "CpuProducts | None"
    """The products of a CPU's compiled kernel. None for a plain weight, and where the kernel is not used."""
    kernels: DeviceProducts | None = None
    """The products of a GPU's kernels. None for a plain weight, and where they are not used."""

    @property
    def out_features(self) -> int:
        return self.weight.shape[0] if isinstance(self.weight, torch.Tensor) else self.weight.out_features

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] if isinstance(self.weight, torch.Tensor) else self.weight.in_features

    @property
    def num_bytes(self) -> int:
        if isinstance(self.weight, torch.Tensor):
            return self.weight.nbytes
        own = self.kernels or self.products
        return self.weight.num_bytes + (0 if own is None else own.num_bytes)

    def dense(self, start: int, end: int) -> torch.Tensor:
        """Returns the outputs [start, end) of the dense weight."""
        if isinstance(self.weight, torch.Tensor):
            return self.weight[start:end]
        if self.products is not None and self.dtype in (torch.float32, torch.bfloat16):
            return self.products.dense(start, end, self.dtype)
        return self.weight.rows(start, end).dense(self.dtype)


def _part(weight: LinearWeight, dtype: torch.dtype) -> _Part:
    if isinstance(weight, torch.Tensor) or weight.packed.device.type != "cpu" or find_spec("numba") is None:
        return _Part(weight, dtype, None)
    if weight.kind is Codes.FLOAT4:  # for kernels of a GPU alone: a CPU has such weights dense
        return _Part(weight, dtype, None)
    from graftwork.engine.quantization.cpu_products import CpuProducts
    from graftwork.engine.quantization.cpu_selftest import why_kernel_fails

    failure = why_kernel_fails(weight.kind)
    if failure is not None:
        loss = "each step makes all weights dense"
        _log.warning("quantised_kernel_unavailable", extra={"reason": failure, "loss": loss})
        return _Part(weight, dtype, None)
    return _Part(weight, dtype, CpuProducts(weight))


def _dense_product(part: _Part, x: torch.Tensor, bias: torch.Tensor | None, rows_at_once: int | None) -> torch.Tensor:
    """Returns the products with a weight of which some outputs are made dense at a time: [num_rows, out_features]."""
    num_rows, columns = len(x), part.out_features
    if num_rows < _LEAST_ROWS:
        x = functional.pad(x, (0, 0, 0, _LEAST_ROWS - num_rows))
    step, blocks = max(_DENSE_VALUES // part.in_features, _LEAST_COLUMNS), torch.split(x, rows_at_once or len(x))
    pieces = []
    for start in range(0, columns, step):
        dense = part.dense(start, min(start + step, columns))
        if len(dense) < _LEAST_COLUMNS:
            dense = functional.pad(dense, (0, 0, 0, _LEAST_COLUMNS - len(dense)))
        pieces.append(torch.cat([functional.linear(block, dense) for block in blocks]))
    y = torch.cat(pieces, dim=1)[:num_rows, :columns]
    return y if bias is None else y + bias
