from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.kernels.lora_plan import plan_for

sizes = st.integers(1, 1000)
features = st.integers(1, 40_000)
ranks = st.integers(1, 128)


@given(sizes, sizes, features, ranks, ranks)
def test_how_features_are_summed_is_the_layers_alone(
    tiles: int, other_tiles: int, in_features: int, max_rank: int, other_rank: int
) -> None:
    """Neither the batch nor the adapters that are present change the order in which input features are added."""
    plan = plan_for(tiles, 3, in_features, max_rank, 2)
    other = plan_for(other_tiles, 3, in_features, other_rank, 2)

    assert (plan.num_spans, plan.block_in) == (other.num_spans, other.block_in)


@given(sizes, features, ranks)
def test_spans_cover_all_features(tiles: int, in_features: int, max_rank: int) -> None:
    """Spans are whole blocks, together reach the end of the features, and blocks of ranks the end of the ranks."""
    plan = plan_for(tiles, 1, in_features, max_rank, 2)

    assert plan.span_features(in_features) % plan.block_in == 0
    assert plan.span_features(in_features) * plan.num_spans >= in_features
    assert plan.rank_blocks(max_rank) * plan.block_rank >= max_rank


def test_spans_run_in_parallel_only_while_the_device_has_room() -> None:
    """A few decode rows spread each sum over programs; a prefill, whose tiles fill the device, does not."""
    decode = plan_for(4, 3, 4096, 16, 2)
    prefill = plan_for(256, 3, 4096, 16, 2)

    assert decode.num_planes == decode.num_spans > 1
    assert prefill.num_planes == 1
    assert prefill.num_spans == decode.num_spans
