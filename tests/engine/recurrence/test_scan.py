"""The recurrence, token by token, against a plain loop and against transformers' own layer."""

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.attention.backend import AttentionBatch, PlacedSlice
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.model.part_weights import RecurrentWeights
from graftwork.engine.model.recurrence import RecurrenceConfig
from graftwork.engine.recurrence.layers import RecurrentLayers
from graftwork.engine.recurrence.scan import Scan, choose_scan, compiled_scan, torch_scan
from graftwork.engine.recurrence.state_pages import StatePages
from graftwork.platform.ids import RequestId
from tests.hypothesis_profiles import examples

PAGE = 3
SIZES = RecurrenceConfig(
    layers=(0, 2, 3), num_heads=4, head_dim=5, num_groups=2, state_size=3, conv_tokens=4, has_conv_bias=True
)
MODEL = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    ropes=(None,) * 4,
    biased_targets=(),
    has_qk_norm=False,
    windows=(None,) * 4,
    tie_word_embeddings=True,
    context_tokens=64,
    eos_token_ids=(),
    dtype="float32",
    recurrence=SIZES,
)
SAMPLE = SampleSpec(SamplingParams(max_tokens=1), seed=0, position=0)


def random_weights(seed: int) -> RecurrentWeights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return RecurrentWeights(
        conv=random(4, SIZES.conv_width),
        conv_bias=random(SIZES.conv_width),
        dt_bias=random(4),
        decay=-torch.exp(random(4)),
        skip=random(4, 1),
        norm=random(SIZES.width),
    )


class Layers:
    """The recurrent layers of MODEL over their own pages, fed with the outputs of in_proj."""

    def __init__(self, num_pages: int = 40, kv_dtype: str = "auto", scan: Scan = torch_scan, page: int = PAGE) -> None:
        form = kv_format(kv_dtype, torch.float32)
        memory = DeviceMemory(num_pages, bytes_per_page(MODEL, page, torch.float32, form), torch.device("cpu"))
        self.cache = KvCache(MODEL, memory, page, torch.float32, form)
        self.pages = StatePages(SIZES, memory, self.cache)
        self.layers = RecurrentLayers(MODEL, [random_weights(seed) for seed in range(3)], self.pages, page, scan)

    def step(self, projected: torch.Tensor, *pieces: RequestSlice, padding: int = 0) -> list[torch.Tensor]:
        """The outputs of each recurrent layer for the rows of some slices."""
        rows = sum(piece.num_tokens for piece in pieces) + padding
        assert len(projected) == rows
        starts = [sum(piece.num_tokens for piece in pieces[:number]) for number in range(len(pieces))]
        placed = tuple(PlacedSlice(start, piece) for start, piece in zip(starts, pieces, strict=True))
        step = self.layers.plan(AttentionBatch(placed, torch.zeros(rows, dtype=torch.int64)))
        return [step.mix(layer, projected) for layer in SIZES.layers]


def piece(name: str, start: int, end: int, *, drafts: int = 0, place: int = 0, first_page: int = 0) -> RequestSlice:
    pages = tuple(PageId(first_page + page) for page in range(-(-end // PAGE)))
    samples = (SAMPLE,) * (drafts + 1) if drafts else ()
    return RequestSlice(RequestId(name), (0,) * (end - start), start, pages, (), samples, place=place)


def random_rows(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, SIZES.input_width, generator=torch.Generator().manual_seed(seed))


def by_definition(projected: torch.Tensor, weights: RecurrentWeights) -> torch.Tensor:
    """What a layer computes for a whole request, in float64, with loops over tokens, heads and features of the state."""
    rows = projected.double()
    end = SIZES.width + SIZES.conv_width
    gate, inputs, dt = rows[:, : SIZES.width], rows[:, SIZES.width : end], rows[:, end:]
    states = torch.zeros(SIZES.num_heads, SIZES.state_size, SIZES.head_dim, dtype=torch.float64)
    outputs = []
    for token in range(len(rows)):
        mixed = weights.conv_bias.double().clone() if weights.conv_bias is not None else torch.zeros(SIZES.conv_width)
        for back in range(min(SIZES.conv_tokens, token + 1)):
            mixed += inputs[token - back] * weights.conv[-1 - back].double()
        mixed = mixed * torch.sigmoid(mixed)
        values, B, C = mixed[: SIZES.width], mixed[SIZES.width : SIZES.width + 6], mixed[SIZES.width + 6 :]
        y = torch.zeros(SIZES.width, dtype=torch.float64)
        for head in range(SIZES.num_heads):
            own = slice(head * SIZES.head_dim, (head + 1) * SIZES.head_dim)
            group = slice(head // 2 * SIZES.state_size, (head // 2 + 1) * SIZES.state_size)
            size = torch.log1p(torch.exp(dt[token, head] + weights.dt_bias[head].double()))
            states[head] *= torch.exp(size * weights.decay[head].double())
            states[head] += size * torch.outer(B[group], values[own])
            y[own] = C[group] @ states[head] + weights.skip[head].double() * values[own]
        y *= gate[token] * torch.sigmoid(gate[token])
        halves = y.view(2, -1)
        normed = halves / torch.sqrt((halves * halves).mean(dim=1, keepdim=True) + 1e-5)
        outputs.append(normed.flatten() * weights.norm.double())
    return torch.stack(outputs)


SCANS = pytest.mark.parametrize("scan", [torch_scan, compiled_scan], ids=["torch", "compiled"])


@SCANS
def test_a_layer_computes_its_definition(scan: Scan) -> None:
    """Each layer's outputs are those of a plain loop in float64, over several pages."""
    projected = random_rows(11, seed=1)

    outputs = Layers(scan=scan).step(projected, piece("a", 0, 11))

    for number, output in enumerate(outputs):
        expected = by_definition(projected, random_weights(number))
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_compiled_loop_serves_on_this_machine() -> None:
    """The self-test passes, so the compiled loop is what serves, and not torch in silence."""
    assert choose_scan() is compiled_scan


@SCANS
@settings(max_examples=examples(40))
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=10), crowd=st.integers(0, 3), seed=st.integers(0, 99))
def test_chunks_and_neighbours_do_not_change_a_bit(scan: Scan, cuts: list[int], crowd: int, seed: int) -> None:
    """However a request is cut into slices, and whoever is beside it, its outputs and its states have the same bits."""
    total, random = sum(cuts), Random(seed)
    rows = random_rows(total, seed)
    whole, cut = Layers(scan=scan), Layers(num_pages=120, scan=scan)
    expected = whole.step(rows, piece("a", 0, total))

    found = list[list[torch.Tensor]]()
    start, lengths = 0, [0] * crowd
    for count in cuts:
        others = list[RequestSlice]()
        for number in range(crowd):
            grown = lengths[number] + random.randrange(1, 4)
            others.append(
                piece(f"other {number}", lengths[number], grown, place=number + 1, first_page=24 * (number + 1))
            )
            lengths[number] = grown
        own = rows[start : start + count]
        around = random_rows(sum(other.num_tokens for other in others), seed + start)
        outputs = cut.step(torch.cat([around, own]), *others, piece("a", start, start + count))
        found.append([output[len(around) :] for output in outputs])
        start += count

    for layer, output in enumerate(expected):
        assert torch.equal(torch.cat([outputs[layer] for outputs in found]), output)
    for page in range(-(-total // PAGE)):
        for mine, theirs in zip(cut.pages.layers, whole.pages.layers, strict=True):
            assert torch.equal(mine.heads[page], theirs.heads[page])
            assert torch.equal(mine.inputs[page], theirs.inputs[page])


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=8), st.integers(0, 99))
def test_drafts_leave_the_state_of_the_accepted_tokens(steps: list[tuple[int, int]], seed: int) -> None:
    """After steps with drafts of which some are accepted, outputs and states have the bits of a run without drafts."""
    generator = Random(seed)
    rows, plain, drafting = random_rows(40, seed), Layers(), Layers()
    known, found = 2, [drafting.step(rows[:2], piece("a", 0, 2))]
    for wanted, accepted in steps:
        drafts = min(wanted, PAGE - 1 - (known + 1) % PAGE)
        accepted = min(accepted, drafts)
        wrong = random_rows(drafts - accepted, generator.randrange(1000))
        own = torch.cat([rows[known : known + 1 + accepted], wrong])
        outputs = drafting.step(own, piece("a", known, known + 1 + drafts, drafts=drafts))
        found.append([output[: 1 + accepted] for output in outputs])
        known += 1 + accepted
    found.append(drafting.step(rows[known : known + 4], piece("a", known, known + 4)))
    known += 4

    expected = plain.step(rows[:known], piece("a", 0, known))

    for layer, output in enumerate(expected):
        assert torch.equal(torch.cat([outputs[layer] for outputs in found]), output)
    last = (known - 1) // PAGE
    for mine, theirs in zip(drafting.pages.layers, plain.pages.layers, strict=True):
        assert torch.equal(mine.heads[last], theirs.heads[last])
        assert torch.equal(mine.inputs[last], theirs.inputs[last])


def test_a_request_that_left_in_the_middle_of_drafts_disturbs_nobody() -> None:
    """The next request in the same place, and the same request from a page's start, do not replay what was kept."""
    rows, layers = random_rows(12, seed=5), Layers()
    expected = Layers().step(rows, piece("b", 0, 12))
    layers.step(rows[:6], piece("a", 0, 6, drafts=1))

    outputs = layers.step(rows[:5], piece("b", 0, 5, first_page=10))
    later = layers.step(rows[5:], piece("b", 5, 12, first_page=10))

    for layer, output in enumerate(expected):
        assert torch.equal(torch.cat([outputs[layer], later[layer]]), output)


def test_rows_of_padding_are_zeros() -> None:
    """Rows behind those of the slices change no state, and their outputs are zeros."""
    outputs = Layers().step(random_rows(6, seed=2), piece("a", 0, 4), padding=2)

    for output in outputs:
        assert output.shape == (6, SIZES.width)
        assert not output[4:].any()
        assert output[:4].any()


def _parts_of(layers: Layers) -> dict[str, torch.Tensor]:
    """The keys and values of the layer with attention, with their scales if they have some."""
    keys, values = layers.cache.stored(1)
    named = zip(("codes", "scales"), zip(keys.parts, values.parts, strict=True), strict=False)
    return {f"{half} {name}": part for name, both in named for half, part in zip(("keys", "values"), both, strict=True)}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_states_share_pages_with_keys_and_values(kv_dtype: str) -> None:
    """Writing all states of a page and all its keys and values overwrites none of the others, and a page that is read and
    written as a whole carries them all."""
    layers = Layers(kv_dtype=kv_dtype, page=4)
    generator, written = torch.Generator().manual_seed(3), dict[str, Any]()
    for number, states in enumerate(layers.pages.layers):
        states.heads[7] = written[f"heads {number}"] = torch.randn(states.heads[7].shape, generator=generator)
        states.inputs[7] = written[f"inputs {number}"] = torch.randn(states.inputs[7].shape, generator=generator)
    for name, part in _parts_of(layers).items():
        part[7] = written[name] = torch.randint(0, 100, part[7].shape, generator=generator).to(part.dtype)
    page = torch.empty(layers.cache.page_shape, dtype=layers.cache.dtype)

    layers.cache.read_page(7, page)
    layers.cache.write_page(9, page)

    found = {name: part[9] for name, part in _parts_of(layers).items()}
    for number, states in enumerate(layers.pages.layers):
        found |= {f"heads {number}": states.heads[9], f"inputs {number}": states.inputs[9]}
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
