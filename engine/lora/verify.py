"""Tests an adapter before any request may use it. The engine's deltas must equal those that plain torch computes.

The test runs every group of projections (linear layers with the same input) on a few random inputs, in every layer. One
input has no adapter, and its output must not change. It runs on the engine's device, through a backend of the kind that
serves there: the Triton kernels on CUDA, torch on a CPU, whose kernel has a self-test of its own (cpu_selftest.py). The
reference is computed on the same device in fp32, from the matrices of the upload and the base model's weights, a few
rows of a weight at a time. So no weight of the base model leaves the device.

On CUDA all of this runs on a stream of its own, and running steps do not wait for it.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch.nn import functional

from graftwork.engine.experts.routes import HostRows
from graftwork.engine.lora.backend import LoraBackend, StepLora
from graftwork.engine.lora.fuse import BaseModules, Module
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.weights import AdapterWeights, ExpertPair, LoraPair
from graftwork.engine.model.projections import HEAD, HEAD_LAYER, ProjectionGroup, place_of, stored_inputs, stored_width
from graftwork.platform.errors import ValidationFailed

_ROW_COUNTS = {"cpu": (5,), "cuda": (5, 80)}
"""The rows of the steps that are tested. On CUDA, short steps and long ones have kernels of their own."""
_SEED = 20260
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The largest error, relative to the largest output. It covers a few roundings of inputs, factors and sums."""
REFERENCE_VALUES = 2**24
"""The most values of a weight that the reference holds in fp32 at a time: 64 MiB."""


@dataclass(frozen=True, slots=True)
class ProbeDevice:
    """Where adapters are tested, and through what."""

    device: torch.device
    new_backend: Callable[[], LoraBackend]
    """Returns a backend of the kind that serves, without adapters. It serves this test alone."""
    row_counts: Sequence[int]
    """The numbers of rows of the steps that are tested, at least 2 each."""

    @classmethod
    def of(cls, device: torch.device, new_backend: Callable[[], LoraBackend]) -> "ProbeDevice":
        return cls(device, new_backend, _ROW_COUNTS[device.type])


class AdapterTester:
    """Tests adapters, one at a time. Any thread may call it."""

    def __init__(self, base: BaseModules, dtype: torch.dtype, where: ProbeDevice) -> None:
        """`base` has the weights of the base model on the device, and `dtype` is the engine's."""
        self._base = base
        self._dtype = dtype
        self._where = where
        self._lock = Lock()
        self._stream = _new_stream(where.device)

    def test(self, weights: AdapterWeights, adapter: ResidentAdapter) -> None:
        """Tests that the engine computes the deltas that the adapter's matrices define.

        `adapter` is on the host. Raises ValidationFailed if an output is wrong. The error names the group of
        projections, such as qkv.
        """
        with self._lock, _on(self._stream), torch.inference_mode():
            probe = _Probe(weights, self._placed(adapter), self._base, self._dtype, self._where)
            probe.run()
        _probe_saved_head(weights, adapter, self._dtype)

    def _placed(self, adapter: ResidentAdapter) -> ResidentAdapter:
        return adapter.over(adapter.buffer.to(self._where.device))


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def _on(stream: torch.cuda.Stream | None) -> Generator[None]:
    """Makes a stream and its device the current ones of this thread. None changes nothing."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
        stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Table:
    """What an adapter changes in an embedding: it adds low-rank factors, or brings a whole one, or both."""

    name: str
    pair: LoraPair | None
    saved: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """The pair (vocabulary, features)."""
        if self.pair is not None:
            return self.pair.A.shape[1], self.pair.B.shape[0]
        assert self.saved is not None, "the adapter changes the embedding"
        return self.saved.shape[0], self.saved.shape[1]


class _Probe:
    """The test of one adapter."""

    def __init__(
        self,
        weights: AdapterWeights,
        adapter: ResidentAdapter,
        base: BaseModules,
        dtype: torch.dtype,
        where: ProbeDevice,
    ) -> None:
        """`adapter` is on the device."""
        self._weights = weights
        self._adapter = adapter
        self._base = base
        self._dtype = dtype
        self._device = where.device
        self._row_counts = where.row_counts
        self._lora = where.new_backend()

    def run(self) -> None:
        self._lora.place(self._adapter)
        generator = torch.Generator(self._device).manual_seed(_SEED)
        wheres = list(_groups_of(self._weights, self._base))
        for num_rows in self._row_counts:
            step = self._step(num_rows)
            for layer, group in wheres:
                self._probe_group(step, num_rows, layer, group, generator)
            for (layer, group_name), pair in self._weights.experts.items():
                self._probe_experts(step, num_rows, (layer, group_name), pair, generator)
            self._probe_embeddings(step, num_rows)

    def _step(self, num_rows: int) -> StepLora:
        """Returns a step of this many rows, of which all but the first use the adapter, and all are sampled."""
        mix = AdapterMix(((self._adapter, 1.0),))
        return self._lora.step([Segment(1, num_rows, mix, 1, num_rows)], num_rows)

    def _probe_group(
        self, step: StepLora, num_rows: int, layer: int, group: ProjectionGroup, generator: torch.Generator
    ) -> None:
        modules = [self._base.module(layer, target) for target in group.targets]
        in_features = modules[0][0].shape[1]
        x = torch.randn(num_rows, in_features, generator=generator, device=self._device).to(self._dtype)
        plain, expected = list[torch.Tensor](), list[torch.Tensor]()
        for target, module in zip(group.targets, modules, strict=True):
            y, adapted = _outputs(self._weights, layer, target, x.float(), module)
            missing = stored_width(target, y.shape[1]) - y.shape[1]
            plain.append(functional.pad(y, (0, missing)))
            expected.append(functional.pad(adapted, (0, missing)))
        x = functional.pad(x, (0, stored_inputs(group.targets[0], in_features) - in_features))
        before = torch.cat(plain, dim=1).to(self._dtype)
        after = before.clone()
        if layer == HEAD_LAYER:
            step.change_logits(after, x)
        else:
            step.add_deltas(after, x, layer, group.name)
        _compare(place_of(layer, ", ".join(group.targets)), before, after, torch.cat(expected, dim=1)[1:], self._dtype)

    def _probe_experts(
        self, step: StepLora, num_rows: int, key: tuple[int, str], pair: ExpertPair, generator: torch.Generator
    ) -> None:
        """Tests one row of each expert. A row of the first token comes before, which has no adapter."""
        count, _, in_features = pair.A.shape
        numbers = np.arange(count)
        tokens, experts = np.append(0, 1 + numbers % (num_rows - 1)), np.append(0, numbers)
        x, before = (
            torch.randn(count + 1, features, generator=generator, device=self._device).to(self._dtype)
            for features in (in_features, pair.B.shape[1])
        )
        after = before.clone()
        step.add_routed(after, x, *key, HostRows(np.arange(count + 1), tokens, experts))
        expected = before[1:].float()
        for expert in range(count):
            A, B, scales = (tensor[expert].to(self._device).float() for tensor in pair.tensors)
            expected[expert] += B @ (scales * (A @ x[expert + 1].float()))
        _compare(f"layer {key[0]}, {key[1]}", before, after, expected, self._dtype)

    def _probe_embeddings(self, step: StepLora, num_rows: int) -> None:
        """Tests what the adapter changes in the embeddings of a few tokens, and in the inputs of layers."""
        weights = self._weights
        for pair, saved, change, name in (
            (weights.embedding, weights.saved_embedding, step.change_embedding, "embed_tokens"),
            (weights.input_embedding, None, step.change_inputs, "embed_tokens_per_layer"),
        ):
            if pair is not None or saved is not None:
                self._probe_table(_Table(name, pair, saved), change, num_rows)

    def _probe_table(
        self, table: "_Table", change: Callable[[torch.Tensor, torch.Tensor], None], num_rows: int
    ) -> None:
        """The base's rows are all ones. Any values serve, because the adapter adds to them or replaces them."""
        pair, saved = table.pair, table.saved
        vocab_size, hidden_size = table.shape
        token_ids = torch.arange(num_rows) * vocab_size // num_rows
        before = torch.ones(num_rows, hidden_size, dtype=self._dtype, device=self._device)
        expected = torch.ones(num_rows - 1, hidden_size) if saved is None else saved[token_ids[1:]].float()
        if pair is not None:
            expected = expected + pair.scale * (pair.A.t()[token_ids[1:]].float() @ pair.B.float().t())
        after = before.clone()
        change(after, token_ids.to(self._device))
        _compare(table.name, before, after, expected.to(self._device), self._dtype)


def _probe_saved_head(weights: AdapterWeights, adapter: ResidentAdapter, dtype: torch.dtype) -> None:
    if weights.saved_head is None:
        return
    if adapter.saved_head is None or not torch.equal(adapter.saved_head, weights.saved_head.to(dtype)):
        raise _mismatch("lm_head, as saved", "another matrix", dtype)


def _groups_of(weights: AdapterWeights, base: BaseModules) -> Iterator[tuple[int, ProjectionGroup]]:
    touched = {*weights.pairs, *weights.biases}
    for layer in sorted({layer for layer, _ in touched}):
        own = base.groups(layer)
        yield from ((layer, group) for group in own if any((layer, target) in touched for target in group.targets))
    if weights.head is not None:
        yield HEAD_LAYER, HEAD


def _outputs(
    weights: AdapterWeights, layer: int, target: str, x: torch.Tensor, module: Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the outputs of one module without and with the adapter, as PEFT computes them, in fp32.

    x: [rows, in_features] fp32. Each result is [rows, out_features].
    """
    weight, bias = module
    pair = weights.head if layer == HEAD_LAYER else weights.pairs.get((layer, target))
    num_rows = max(REFERENCE_VALUES // weight.shape[1], 1)
    parts = [
        _products(x, weight[start : start + num_rows], pair, slice(start, start + num_rows))
        for start in range(0, len(weight), num_rows)
    ]
    plain, adapted = (torch.cat(outputs, dim=1) for outputs in zip(*parts, strict=True))
    trained = weights.biases.get((layer, target), bias)
    if bias is not None:
        plain = plain + bias.float()
    if trained is not None:
        adapted = adapted + trained.to(x.device).float()
    if pair is not None and pair.bias is not None:
        adapted = adapted + pair.scale * pair.bias.to(x.device).float()
    return plain, adapted


def _products(
    x: torch.Tensor, weight: torch.Tensor, pair: LoraPair | None, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the products of x with some rows of a weight, without and with an adapter's change of them."""
    merged = weight.float()
    plain = x @ merged.t()
    if pair is None:
        return plain, plain
    B, A = pair.B[rows].to(x.device).float(), pair.A.to(x.device).float()
    merged = merged + pair.scale * (B @ A)
    if pair.magnitude is not None:
        norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
        merged = merged * (pair.magnitude[rows].to(x.device).float() / norms)[:, None]
    return plain, x @ merged.t()


def _compare(
    place: str,
    before: torch.Tensor,
    after: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    # expected: [rows - 1, features], because the first row has no adapter
    error = (after[1:].float() - expected).abs().max().item()
    size = max(expected.abs().max().item(), before.float().abs().max().item(), 1e-6)
    if not torch.equal(after[0], before[0]) or not error <= _TOLERANCE[dtype] * size:
        raise _mismatch(place, f"{error:.3g} where values reach {size:.3g}", dtype)


def _mismatch(place: str, difference: str, dtype: torch.dtype) -> ValidationFailed:
    return ValidationFailed(
        f"weights: {place}: the engine's result differs from the adapter's matrices by {difference}, more than {dtype} "
        "explains. The adapter would not behave as trained, so it is refused.",
        param="weights",
        code="adapter_probe_failed",
    )
