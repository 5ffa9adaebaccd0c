"""Attention over the pages of windowed layer groups, whose first pages are gone: by Triton's interpreter and in torch."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from graftwork.engine.attention.key_groups import KeyGrouper
from graftwork.engine.attention.launch import ScoreRules
from graftwork.engine.attention.reference import attend
from graftwork.engine.attention.torch_attention import TorchAttention
from graftwork.engine.core.step import RequestSlice, WindowTables
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.layer_groups import LayerGroups
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import read_model_config
from tests.engine.attention.batches import batch_of, piece
from tests.engine.attention.cases import CPU
from tests.engine.conftest import RandomModels

PAGE, WINDOW, NUM_FRAMES = 4, 10, 120
GROUPS = LayerGroups(((2,), (0,), (1,)), WINDOW)
SHAPES = {"a": (61, 1, 0), "b": (37, 6, 0), "c": (0, 5, 0), "d": (50, 3, 2)}
"""By request: the first position, the number of tokens, and how many of them are drafts."""


def windowed(number: int, name: str) -> RequestSlice:
    """A slice whose windowed groups have only the pages that its first query sees, in frames of their own."""
    start, count, num_drafts = SHAPES[name]
    end = -(-(start + count) // PAGE)
    first = max(start - WINDOW + 1, 0) // PAGE
    own = iter(PageId(frame) for frame in range(30 * number, 30 * number + 30))
    full = [next(own) for _ in range(end)]
    tables = tuple(tuple(next(own) for _ in range(first, end)) for _ in range(2))
    return replace(piece(name, start, count, full, num_drafts), windows=WindowTables(first, tables))


def as_one_table(one: RequestSlice, group: int) -> RequestSlice:
    """The same slice with one page table: the group's, with any page in place of those that are gone."""
    first, pages = one.table(group)
    return replace(one, pages=(*[PageId(0)] * first, *pages), windows=None)


@pytest.mark.parametrize("kind", ["triton", "torch"])
def test_each_layer_reads_the_pages_of_its_own_group(
    interpreted: dict[str, ModuleType], models: RandomModels, kind: str
) -> None:
    """Chunks, decoding rows and drafts of several requests equal fp64 attention over their own groups' pages, and read no
    page that they do not hold."""
    model = replace(read_model_config(models.base), num_layers=3, windows=(WINDOW, WINDOW - 3, None))
    memory = DeviceMemory(NUM_FRAMES, bytes_per_page(model, PAGE, torch.float32, groups=GROUPS), CPU)
    cache = KvCache(model, memory, PAGE, torch.float32, groups=GROUPS)
    pieces = [windowed(number, name) for number, name in enumerate(SHAPES)]
    batch = batch_of(pieces)
    generator = torch.Generator().manual_seed(3)
    held = torch.tensor(sorted({frame for one in pieces for frame in one.frames}))
    for layer in range(3):
        for pages in cache.layer(layer):
            pages[:NUM_FRAMES] = float("nan")
            pages[held] = torch.randn((len(held), *pages.shape[1:]), generator=generator)
    query = torch.randn(batch.num_rows, model.num_heads, model.head_dim, generator=generator)
    if kind == "triton":
        step = interpreted["triton_attention"].TritonAttention(model, cache, torch.float32).plan(batch)
    else:
        rules = BatchInvariance(1, 1, attends_in_any_shape=True)
        step = TorchAttention(model, cache, KeyGrouper(PAGE, memory.null_frame, CPU, rules, 3), None).plan(batch)

    mixed = [step.attend(layer, query) for layer in range(3)]

    for layer, group in ((0, 1), (1, 2), (2, 0)):
        one_table = batch_of([as_one_table(one, group) for one in pieces])
        rules_of_layer = ScoreRules(model.score_scale, model.windows[layer], None, None)
        keys, values = (pages.nan_to_num() for pages in cache.layer(layer))
        expected = attend(query, keys, values, one_table, rules_of_layer)
        torch.testing.assert_close(mixed[layer].double(), expected, atol=1e-5, rtol=1e-5)
