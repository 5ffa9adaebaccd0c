"""Tests of the CPU backend: which rows use the kernel and which use torch, and the tables of addresses."""

import gc
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graftwork.engine.lora import cpu_backend as native_lora
from graftwork.engine.lora import cpu_kernel as native_rows
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.cpu_backend import AddressTables, CpuLora
from graftwork.engine.lora.cpu_memory import LIKE
from graftwork.engine.lora.cpu_selftest import why_cpu_kernel_fails
from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.packs import AdapterMix, PackCache
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraRows, TorchLora
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.projections import GroupShape
from tests.engine.lora.triton.engine_runs import weights
from tests.engine.lora.triton.test_backend import LayerShapes

DTYPES = list(LIKE)
SHAPES = {
    (0, "qkv"): GroupShape(32, (32, 16, 16)),
    (0, "o"): GroupShape(32, (32,)),
    (0, "gate_up"): GroupShape(32, (56, 56)),
    (0, "down"): GroupShape(56, (32,)),
}


def torch_lora(dtype: torch.dtype = torch.float32) -> TorchLora:
    rules = BatchInvariance.of(dtype)
    return TorchLora(PackCache(1 << 20, rules.min_columns), rules)


def resident(digest: str, rank: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> ResidentAdapter:
    return build_resident(weights(digest, rank, seed, scale=1.3), LayerShapes(), dtype)


def native(dtype: torch.dtype) -> CpuLora:
    """Returns a CPU backend over the fused layers of the random models."""
    return CpuLora(AddressTables(SHAPES, dtype), torch_lora(dtype))


@pytest.fixture
def lora() -> Iterator[CpuLora]:
    """A CPU backend whose tables are checked when the test ends."""
    made = native(torch.float32)
    yield made
    made.check_integrity()


def place(lora: LoraBackend, adapter: ResidentAdapter) -> ResidentAdapter:
    lora.place(adapter)
    return adapter


def only(adapter: ResidentAdapter, weight: float = 1.0) -> AdapterMix:
    return AdapterMix(((adapter, weight),))


def decoding(start: int, end: int, mix: AdapterMix) -> Segment:
    return Segment(start, end, mix, decoding=tuple(range(start, end)))


def added(
    lora: LoraBackend, segments: list[Segment], num_rows: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns what a step adds to every group, side by side. All rows have the same input and base output."""
    generator = torch.Generator().manual_seed(7)
    step = lora.step(segments, num_rows)
    outputs = []
    for key, shape in SHAPES.items():
        x = torch.randn(1, shape.in_features, generator=generator).to(dtype).repeat(num_rows, 1)
        y = torch.randn(1, sum(shape.widths), generator=generator).to(dtype).repeat(num_rows, 1)
        step.add_deltas(y, x, *key)
        outputs.append(y)
    return torch.cat(outputs, dim=1)


def untouched(num_rows: int) -> torch.Tensor:
    return added(torch_lora(), [], num_rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_decode_are_torchs_within_rounding(dtype: torch.dtype) -> None:
    """Decoding rows of several ranks, of a mixture and of the base equal torch's within rounding."""
    lora, plain = native(dtype), torch_lora(dtype)
    adapters = [resident(f"{rank}", rank, rank, dtype) for rank in (1, 8, 20, 128)]
    for adapter in adapters:
        place(lora, adapter)
    mixes = [*map(only, adapters), AdapterMix(((adapters[1], 0.5), (adapters[2], -2.0), (adapters[3], 0.1)))]
    segments = [decoding(3 * number + 1, 3 * number + 3, mix) for number, mix in enumerate(mixes)]

    actual = added(lora, segments, 16, dtype)

    expected = added(plain, segments, 16, dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype] * expected.abs().max().item()
    assert (actual - expected).abs().max() <= tolerance
    assert torch.equal(actual[0::3], expected[0::3])
    assert not torch.equal(actual[1], actual[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_of_a_row_is_its_own(dtype: torch.dtype) -> None:
    """Decoding rows with equal inputs have one result, and rows of chunks another, in any batch."""
    lora = native(dtype)
    adapters = [place(lora, resident(name, rank, rank, dtype)) for name, rank in (("a", 12), ("b", 24))]
    random = Random(3)
    ways: dict[tuple[str, bool], torch.Tensor] = {}
    for _ in range(12):
        segments, start = [], random.randrange(3)
        for adapter in random.sample(adapters, 2):
            end = start + random.randrange(1, 30)
            own = tuple(row for row in range(start, end) if random.random() < 0.4)
            segments.append(Segment(start, end, only(adapter), decoding=own))
            start = end + random.randrange(12)

        result = added(lora, segments, -(-start // 8) * 8, dtype)

        for segment in segments:
            adapter = segment.mix.parts[0][0]
            for row in range(segment.start, segment.end):
                way = ways.setdefault((adapter.digest, row in segment.decoding), result[row])
                assert torch.equal(result[row], way)
    assert len(ways) == 4


def test_rows_are_counted_by_what_applies_them(lora: CpuLora) -> None:
    """Decoding rows count for the kernel and rows of chunks for torch. Rows without an adapter do not count."""
    adapter = place(lora, resident("a", 8))

    for _ in range(2):
        lora.step([Segment(1, 9, only(adapter), decoding=(1, 2, 5)), decoding(10, 12, only(adapter, 0.5))], 16)

    assert lora.rows == LoraRows(kernels=10, torch=10)


def test_a_chunk_has_torchs_bits(lora: CpuLora) -> None:
    """Rows of a prefill chunk have the bits of torch, also beside decoding rows."""
    a, b = place(lora, resident("a", 8)), place(lora, resident("b", 16, seed=2))
    native = [Segment(0, 5, only(a), decoding=(2,)), Segment(5, 30, only(b)), Segment(30, 40, only(a), decoding=(30,))]
    plain = [Segment(0, 5, only(a)), Segment(5, 30, only(b)), Segment(30, 40, only(a))]

    actual, expected = added(lora, native, 40), added(torch_lora(), plain, 40)

    chunks = [row for row in range(40) if row not in (2, 30)]
    assert torch.equal(actual[chunks], expected[chunks])


def test_a_forgotten_adapter_leaves_no_address(lora: CpuLora) -> None:
    """A forgotten adapter is in no table and in no later step, and its buffer is freed."""
    adapter, stays = place(lora, resident("a", 8)), place(lora, resident("stays", 8, seed=2))
    step = [decoding(0, 2, only(adapter)), decoding(2, 3, only(stays))]
    before = added(lora, step, 8)
    memory = StorageWeakRef(adapter.buffer.untyped_storage())  # type: ignore[no-untyped-call]

    lora.forget("a")
    assert [int((lora.tables.group(key)[0] != 0).any(axis=1).sum()) for key in SHAPES] == [1] * len(SHAPES)
    del adapter, step
    gc.collect()

    assert memory.expired()  # type: ignore[no-untyped-call]
    assert torch.equal(added(lora, [decoding(2, 3, only(stays))], 8)[2], before[2])
    with pytest.raises(KeyError):
        lora.tables.slot_of("a")


def test_an_adapter_that_has_moved_is_read_where_it_lies_now(lora: CpuLora) -> None:
    """An adapter that was placed again is read from its new buffer only."""
    adapter = place(lora, resident("a", 8))
    before = added(lora, [decoding(0, 3, only(adapter))], 8)
    buffer = adapter.buffer.clone()

    def view(tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.storage_offset() * tensor.itemsize
        return buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    moved = adapter.mapped(view, buffer)
    lora.forget("a")
    adapter.buffer.fill_(0xFF)
    place(lora, moved)

    assert torch.equal(added(lora, [decoding(0, 3, only(moved))], 8), before)


def test_entries_are_used_again_and_grow_with_their_number(lora: CpuLora) -> None:
    """The tables grow to the largest number of adapters at once, and entries are used again."""
    many = [place(lora, resident(f"stays-{number}", 8, number)) for number in range(40)]
    alone = added(lora, [decoding(0, 1, only(many[0]))], 8)
    size = lora.tables.num_slots
    for number in range(200):
        adapter = place(lora, resident("goes", 8, 50 + number % 2))
        assert not torch.equal(added(lora, [decoding(0, 1, only(adapter))], 8), untouched(8))
        lora.forget("goes")
        lora.check_integrity()

    assert lora.tables.num_slots == size
    assert torch.equal(added(lora, [decoding(0, 1, only(many[0]))], 8), alone)


def test_a_mixture_may_have_more_ranks_than_any_layer_is_wide(lora: CpuLora) -> None:
    """A mixture of four adapters of rank 128, wider than any layer, is computed."""
    parts = tuple((place(lora, resident(name, 128, seed)), 0.3) for seed, name in enumerate("abcd"))

    actual = added(lora, [decoding(0, 3, AdapterMix(parts))], 8)

    expected = added(torch_lora(), [decoding(0, 3, AdapterMix(parts))], 8)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


# ---- the trial ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_computes_passes_its_trial(dtype: torch.dtype) -> None:
    """The kernel passes its self-test on this machine in both dtypes."""
    assert why_cpu_kernel_fails(dtype) is None


def test_a_kernel_that_computes_something_else_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that adds nothing fails the self-test, which tells the error's size."""
    monkeypatch.setattr(native_lora, "add_to_rows", lambda *arguments: None)

    assert "differ from plain torch" in str(why_cpu_kernel_fails(torch.float32))


def test_a_kernel_that_mixes_the_rows_of_a_pair_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose result depends on a row's place in a pair fails the self-test."""
    add_to_rows = native_rows.add_to_rows

    def second_once_more(y, x, group, rows, scratch, like):  # type: ignore[no-untyped-def]
        add_to_rows(y, x, group, rows, scratch, like)
        pairs, slots, weights = rows
        uneven = pairs[pairs[:, 0] != pairs[:, 1]]
        uneven[:, 0] = uneven[:, 1]
        add_to_rows(y, x, group, (uneven, slots, weights), scratch, like)

    monkeypatch.setattr(native_lora, "add_to_rows", second_once_more)

    assert "neighbour" in str(why_cpu_kernel_fails(torch.float32))


def test_a_kernel_that_does_not_build_fails_it_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile fails the self-test with numba's reason in one line."""

    def broken(*arguments: object) -> None:
        raise RuntimeError("no such processor\nat all")

    monkeypatch.setattr(native_lora, "add_to_rows", broken)

    assert why_cpu_kernel_fails(torch.float32) == "RuntimeError: no such processor"
