"""Adapters on experts: the compiled kernel and torch against single products in fp64, and the probe of an upload."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from graftwork.engine.core.expert_shapes import ExpertShapes
from graftwork.engine.experts.routes import HostRows
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.cpu_backend import CpuLora, build_cpu_lora
from graftwork.engine.lora.expert_factors import SingleFactors, joined_pair, stacked_pair
from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.packs import AdapterMix, PackCache
from graftwork.engine.lora.resident_adapter import ResidentAdapter
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import TorchLora
from graftwork.engine.lora.verify import AdapterTester, ProbeDevice
from graftwork.engine.lora.weights import AdapterWeights, ExpertPair
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.experts import ExpertsConfig, RouterScore, RouterSpec
from graftwork.engine.model.rope_config import RopeConfig
from graftwork.platform.errors import ValidationFailed

COUNT, HIDDEN, INNER = 5, 48, 40
SHAPES = ExpertShapes(COUNT, HIDDEN, INNER, (1,))
KEY = 1, "experts_down"
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    ropes=(RopeConfig(10_000.0),) * 2,
    biased_targets=(),
    has_qk_norm=False,
    windows=(None,) * 2,
    tie_word_embeddings=False,
    context_tokens=64,
    eos_token_ids=(0,),
    dtype="float32",
    experts=ExpertsConfig(SHAPES, RouterSpec(RouterScore.SOFTMAX, 2)),
)
NO_BASE: Any = None
"""Adapters of experts alone ask nothing of the base model."""


def weights(digest: str, rank: int, scale: float) -> AdapterWeights:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    pairs = {
        group: ExpertPair(random(COUNT, rank, into), random(COUNT, out, rank), torch.full((COUNT, rank), scale))
        for group, (out, into) in (("experts_gate_up", SHAPES.gate_up), ("experts_down", SHAPES.down))
    }
    return AdapterWeights(digest, {}, experts={(1, group): pair for group, pair in pairs.items()})


WEIGHTS = [weights("a", 3, 2.0), weights("b", 8, 0.7), weights("c", 17, 1.0)]
ROWS = HostRows(
    rows=np.array([0, 1, 2, 4, 5, 6, 7, 9, 12]),
    tokens=np.array([0, 1, 2, 3, 0, 2, 4, 3, 1]),
    experts=np.array([0, 0, 0, 0, 2, 2, 2, 3, 4]),
)
"""The rows of five tokens, with padding between."""
NUM_ROWS = 13


def placed(backend: LoraBackend, dtype: torch.dtype) -> list[ResidentAdapter]:
    found = [build_resident(one, NO_BASE, dtype) for one in WEIGHTS]
    for adapter in found:
        backend.place(adapter)
    return found


def backend_of(kernels: str, dtype: torch.dtype) -> LoraBackend:
    rules = BatchInvariance.of(dtype)
    plain = TorchLora(PackCache(2**20, rules.min_columns), rules)
    return build_cpu_lora(MODEL, dtype, plain) if kernels == "native" else plain


def expected(x: torch.Tensor, uses: Sequence[Sequence[tuple[int, float]]], dtype: torch.dtype) -> torch.Tensor:
    """What each row gets, in fp64, from factors in the engine's dtype. `uses` are the adapters of each token."""
    deltas = torch.zeros(NUM_ROWS, HIDDEN, dtype=torch.float64)
    for row, token, expert in zip(ROWS.rows, ROWS.tokens, ROWS.experts, strict=True):
        for number, weight in uses[token]:
            pair = WEIGHTS[number].experts[KEY]
            A, B = (factor[expert].to(dtype).double() for factor in (pair.A, pair.B))
            deltas[row] += weight * (B @ (pair.scales[expert].double() * (A @ x[row].double())))
    return deltas


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_each_row_gets_the_factors_of_its_adapter_and_expert(kernels: str, dtype: torch.dtype) -> None:
    """Rows of one adapter, of a mixture and of the base get what single products give them, whatever the ranks."""
    backend = backend_of(kernels, dtype)
    a, b, c = placed(backend, dtype)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(NUM_ROWS, width, generator=generator).to(dtype) for width in (INNER, HIDDEN))
    mixes = [AdapterMix(((a, 1.0),)), AdapterMix(((b, 0.5), (c, -1.5))), AdapterMix(((c, 1.0),))]
    segments = [Segment(start, end, mix) for (start, end), mix in zip([(0, 2), (2, 3), (4, 5)], mixes, strict=True)]
    after = y.clone()

    backend.step(segments, 5).add_routed(after, x, *KEY, ROWS)

    deltas = expected(x, [[(0, 1.0)], [(0, 1.0)], [(1, 0.5), (2, -1.5)], [], [(2, 1.0)]], dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(after.double(), y.double() + deltas, atol=tolerance * 4, rtol=tolerance)
    assert torch.equal(after[[3, 4, 8, 9, 10, 11]], y[[3, 4, 8, 9, 10, 11]])
    assert not torch.equal(after[12], y[12])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_rows_bits_are_its_own(kernels: str, dtype: torch.dtype) -> None:
    """A row has the same bits alone and among rows of its own expert and adapter, and of others."""
    backend = backend_of(kernels, dtype)
    mix = AdapterMix(((placed(backend, dtype)[1], 1.0),))
    x = torch.randn(NUM_ROWS, INNER, generator=torch.Generator().manual_seed(2)).to(dtype)

    def added(rows: HostRows) -> torch.Tensor:
        y = torch.zeros(NUM_ROWS, HIDDEN, dtype=dtype)
        backend.step([Segment(0, 5, mix)], 5).add_routed(y, x, *KEY, rows)
        return y

    together = added(ROWS)

    for index in range(len(ROWS.rows)):
        one = slice(index, index + 1)
        alone = added(HostRows(ROWS.rows[one], ROWS.tokens[one], ROWS.experts[one]))
        assert torch.equal(alone[ROWS.rows[index]], together[ROWS.rows[index]])


def test_addresses_end_with_their_adapter() -> None:
    """A forgotten adapter leaves no address; the others serve on, and its slot serves another."""
    backend = backend_of("native", torch.float32)
    assert isinstance(backend, CpuLora)
    a, _, c = placed(backend, torch.float32)

    backend.forget("a")

    backend.check_integrity()
    backend.forget("b")
    backend.place(a)
    backend.check_integrity()
    x = torch.randn(NUM_ROWS, INNER, generator=torch.Generator().manual_seed(3))
    after = torch.zeros(NUM_ROWS, HIDDEN)
    segments = [Segment(0, 1, AdapterMix(((a, 1.0),))), Segment(1, 5, AdapterMix(((c, 1.0),)))]
    backend.step(segments, 5).add_routed(after, x, *KEY, ROWS)
    deltas = expected(x, [[(0, 1.0)], *[[(2, 1.0)]] * 4], torch.float32)
    torch.testing.assert_close(after.double(), deltas, atol=1e-4, rtol=1e-4)


def test_the_bytes_of_experts_count() -> None:
    """An adapter's buffer holds the factors of all experts, in whole pages of ranks and lines of memory."""
    resident = build_resident(WEIGHTS[2], NO_BASE, torch.float32)

    features = sum((*SHAPES.gate_up, *SHAPES.down))
    assert resident.num_bytes == COUNT * 24 * features * 4
    assert (resident.max_ranks, WEIGHTS[2].max_rank) == (24, 17)


def new_tester() -> AdapterTester:
    rules = BatchInvariance.of(torch.float32)
    where = ProbeDevice(torch.device("cpu"), lambda: TorchLora(PackCache(0, rules.min_columns), rules), (5,))
    return AdapterTester(NO_BASE, torch.float32, where)


@pytest.mark.parametrize("group", ["experts_gate_up", "experts_down"])
def test_the_probe_names_experts_that_differ_from_the_file(group: str) -> None:
    """Right factors pass; one wrong expert of a group is found and named."""
    right = WEIGHTS[1]
    new_tester().test(right, build_resident(right, NO_BASE, torch.float32))
    pair = right.experts[1, group]
    B = pair.B.clone()
    B[3] *= -1
    wrong = replace(right, experts=right.experts | {(1, group): replace(pair, B=B)})

    with pytest.raises(ValidationFailed, match=f"layer 1, {group}"):
        new_tester().test(right, build_resident(wrong, NO_BASE, torch.float32))


def test_a_value_that_does_not_fit_is_named() -> None:
    """A factor that is infinite in the engine's dtype is refused, with its group."""
    pair = WEIGHTS[0].experts[KEY]
    large = replace(WEIGHTS[0], experts={KEY: replace(pair, A=pair.A * 1e6)})

    with pytest.raises(ValidationFailed, match="layer 1, experts_down"):
        build_resident(large, NO_BASE, torch.float16)


def test_joined_factors_are_split_as_peft_splits_them() -> None:
    """The change of each expert's weight is that of PEFT's einsum, also if gates and ups take turns."""
    generator = torch.Generator().manual_seed(4)
    A, B = torch.randn(COUNT * 3, HIDDEN, generator=generator), torch.randn(12, 3 * COUNT, generator=generator)
    theirs = torch.einsum("o r e, e r i -> e o i", B.reshape(12, -1, COUNT), A.reshape(COUNT, -1, HIDDEN)) * 0.7

    plain, turned = (joined_pair(A, B, 0.7, COUNT, interleaves=interleaves) for interleaves in (False, True))

    for pair, change in ((plain, theirs), (turned, torch.cat([theirs[:, 0::2], theirs[:, 1::2]], dim=1))):
        torch.testing.assert_close(pair.B @ (pair.scales[..., None] * pair.A), change)


def test_single_factors_change_their_own_outputs_alone() -> None:
    """Gate and up of one expert keep their own ranks and scales; an expert without factors is not changed."""
    generator = torch.Generator().manual_seed(5)
    parts = [
        SingleFactors(expert, torch.randn(rank, HIDDEN, generator=generator), torch.randn(6, rank), scale, start)
        for expert, rank, scale, start in ((0, 2, 0.5, 0), (0, 5, 3.0, 6), (3, 1, 1.0, 6))
    ]

    pair = stacked_pair(parts, COUNT, 12)

    changes = pair.B @ (pair.scales[..., None] * pair.A)  # [experts, 12, hidden]
    wanted = torch.zeros(COUNT, 12, HIDDEN)
    for part in parts:
        wanted[part.expert, part.out_start : part.out_start + 6] += part.scale * (part.B @ part.A)
    torch.testing.assert_close(changes, wanted)
