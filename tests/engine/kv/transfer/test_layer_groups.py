"""How layers are divided into groups with pages of their own."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.kv.transfer.layer_groups import LayerGroups, layer_groups
from tests.engine.runner.row_sides import MODEL


def groups_of(windows: Sequence[int | None]) -> LayerGroups:
    return layer_groups(replace(MODEL, num_layers=len(windows), windows=tuple(windows)))


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
