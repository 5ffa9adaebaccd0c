"""How layers are divided into groups with pages of their own."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.layer_groups import LayerGroups, layer_groups, request_bytes
from graftwork.engine.model.config import ModelConfig
from tests.engine.runner.row_sides import MODEL


def model_of(windows: Sequence[int | None], num_sharing: int = 0) -> ModelConfig:
    """A model with layers of these windows. The last ones read the last earlier layer with the same window."""
    num_own = len(windows) - num_sharing
    last = {window: layer for layer, window in enumerate(windows[:num_own])}
    sources = tuple(layer if layer < num_own else last[window] for layer, window in enumerate(windows))
    return replace(MODEL, num_layers=len(windows), windows=tuple(windows), kv_sources=sources)


def groups_of(windows: Sequence[int | None], num_sharing: int = 0) -> LayerGroups:
    return layer_groups(model_of(windows, num_sharing))


@given(st.lists(st.none() | st.sampled_from([128, 1024]), min_size=1, max_size=70))
def test_every_division_keeps_its_promises(windows: list[int | None]) -> None:
    """Each layer is in one group, no layer without a window is in a windowed group, all groups but the last have the same
    size, and the last leaves at most a tenth of a page empty."""
    found = groups_of(windows)

    first, *others = found.groups
    assert sorted(layer for group in found.groups for layer in group) == list(range(len(windows)))
    assert {layer for layer, window in enumerate(windows) if window is None} <= set(first)
    assert all(len(group) == len(first) for group in others[:-1])
    assert len(first) * len(found.groups) <= max(1.1 * len(windows), len(windows))
    assert len(found.groups) <= 8
    widths = [window for group in others for layer in group if (window := windows[layer]) is not None]
    assert found.window == max(widths, default=None)
    assert list(found.places()) == [
        (layer, group, place) for group, layers in enumerate(found.groups) for place, layer in enumerate(layers)
    ]


GEMMA3N = [512 if (layer + 1) % 5 else None for layer in range(35)]


def test_layers_that_read_those_of_others_have_no_pages() -> None:
    """The groups, the bytes of a page and those of a request are the same with such layers behind and without them, and
    such a layer has the memory, the group and the gate of the layer that it reads."""
    model, shorter = model_of(GEMMA3N, 15), model_of(GEMMA3N[:20])
    groups = layer_groups(model)
    dtype = torch.bfloat16

    assert groups == layer_groups(shorter)
    assert bytes_per_page(model, 16, dtype, groups=groups) == bytes_per_page(shorter, 16, dtype, groups=groups)
    assert bytes_per_page(model, 16, dtype) == bytes_per_page(shorter, 16, dtype) == model.kv_page_bytes(16, 2)
    for num_tokens in (5, 500, 5000):
        assert request_bytes(model, num_tokens, 2) == request_bytes(shorter, num_tokens, 2)
    memory = DeviceMemory(2, bytes_per_page(model, 16, dtype, groups=groups), torch.device("cpu"))
    cache = KvCache(model, memory, 16, dtype, groups=groups)
    assert cache.num_layers == 4
    for layer in range(20, 35):
        source = 18 if GEMMA3N[layer] else 19
        assert cache.group_of[layer] == cache.group_of[source]
        for own, other in zip(cache.layer(layer), cache.layer(source), strict=True):
            assert (own.data_ptr(), own.shape, own.stride()) == (other.data_ptr(), other.shape, other.stride())


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 32, [32]),
        ([1024 if (layer + 1) % 6 else None for layer in range(62)], [11, 11, 11, 11, 11, 7]),
        ([1024 if (layer + 1) % 6 else None for layer in range(34)], [5, 5, 5, 5, 5, 5, 4]),
        ([128, None] * 18, [18, 18]),
        ([4096] * 32, [4] * 8),
        ([None] * 28 + [4096] * 8, [36]),
        ([4096], [1]),
    ],
    ids=["llama", "gemma3-27b", "gemma3-4b", "gpt-oss-120b", "mistral-7b-v0.1", "qwen2", "one layer"],
)
def test_known_models_are_divided_so(windows: list[int | None], sizes: list[int]) -> None:
    """Few full layers make small pages of many groups; a division that would waste memory is not made."""
    assert [len(group) for group in groups_of(windows).groups] == sizes
