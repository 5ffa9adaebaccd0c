"""Tests of how many kernels a decoder layer launches, with a driver that records launches instead of running them."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graftwork.engine.model.layers import Linear
from graftwork.engine.model.mlp_weights import DenseWeights
from graftwork.engine.model.weights import DecoderWeights, LayerWeights
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.runner.row_ops import TorchRowOps
from tests.engine.runner.row_sides import MODEL, batch_of, side

pytest.importorskip("triton", reason="the kernels extra is not installed")

ALLOCATIONS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}


class CountedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of torch that would launch a kernel on a GPU: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if not func.is_view and name not in ALLOCATIONS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class NoAttention:
    """Attention that launches nothing."""

    def attend(self, layer: int, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return query.flatten(1)


class NoLora:
    """A step without adapters."""

    def add_deltas(self, *arguments: Any) -> None:
        return

    change_embedding = change_logits = add_deltas


def weights(num_layers: int) -> DecoderWeights:
    hidden, inner, query = MODEL.hidden_size, MODEL.intermediate_size, MODEL.num_heads * MODEL.head_dim
    layer = LayerWeights(
        attention_norm=torch.ones(hidden),
        qkv=Linear(torch.ones(query + 2 * MODEL.kv_width, hidden)),
        qk_norm=torch.ones(MODEL.num_heads + MODEL.num_kv_heads, MODEL.head_dim),
        output=Linear(torch.ones(hidden, query)),
        mlp_norm=torch.ones(hidden),
        mlp=DenseWeights(Linear(torch.ones(2 * inner, hidden)), Linear(torch.ones(hidden, inner))),
    )
    embedding = torch.ones(MODEL.vocab_size, hidden)
    return DecoderWeights(embedding, (layer,) * num_layers, ({},) * num_layers, torch.ones(hidden), Linear(embedding))


def launches(kind: type, num_layers: int) -> Counter[str]:
    """The kernels of one decode step without attention and adapters: torch's operations, and ours by their names."""
    from tests.engine.kernels.fake_driver import fake_driver

    rows = side(kind, MODEL).rows
    decoder = Decoder(MODEL, weights(num_layers), rows, lambda: None)
    batch = batch_of([(3, 1), (5, 1), (8, 1)])
    attention: Any = NoAttention()
    lora: Any = NoLora()
    with torch.inference_mode(), fake_driver() as driver, CountedOps() as counted:
        decoder.hidden(batch, attention, lora)
    found: Counter[str] = counted.names + Counter(launch.kernel for launch in driver.launches)
    return found


def of_a_layer(kind: type) -> Counter[str]:
    """What one more layer launches."""
    return launches(kind, 2) - launches(kind, 1)


def test_a_layer_launches_four_products_and_four_row_kernels() -> None:
    """Besides attention and adapters a layer launches its four matrix products and four row kernels, nothing else."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    assert of_a_layer(TritonRowOps) == {
        "aten::linear": 4,
        "add_norm_kernel": 2,
        "rotate_and_store_kernel": 1,
        "activate_kernel": 1,
    }


def test_torch_launches_more_than_twice_as_many() -> None:
    """In torch the same layer is more than twice as many launches, so the row kernels are worth having."""
    found = of_a_layer(TorchRowOps)

    assert found["aten::linear"] == 4
    assert found.total() > 2 * 8


def test_a_step_with_row_kernels_waits_for_nothing() -> None:
    """Besides its layers a step launches the embedding and one sum: it copies nothing and reads no number back from the
    device."""
    from graftwork.engine.runner.triton_row_ops import TritonRowOps

    step, layer = launches(TritonRowOps, 1), of_a_layer(TritonRowOps)

    assert step - layer == {"aten::embedding": 1, "aten::add": 1}
    assert layer - step == {}
