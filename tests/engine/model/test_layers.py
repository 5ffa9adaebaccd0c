"""Tests of the layers: rotary tables and linear layers."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from graftwork.engine.model.layers import Linear
from graftwork.engine.model.rope_config import read_rope_config
from graftwork.engine.model.rotary import RotaryTable, rotary_frequencies

HEAD_DIM, CONTEXT = 32, 512
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "large theta": {"rope_type": "default", "rope_theta": 1_000_000},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3 | {"rope_theta": 500_000.0},
    "llama3 of another band": LLAMA3 | {"factor": 32, "low_freq_factor": 0.5, "high_freq_factor": 8},
    "yarn": YARN,
    "yarn with a given attention factor": YARN | {"attention_factor": 0.75},
    "yarn with mscale": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7},
    "yarn untruncated": YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 2},
    "yarn of equal bounds": YARN | {"beta_fast": 22, "beta_slow": 21},
    "yarn of bounds below the first pair": YARN | {"beta_fast": 5000, "beta_slow": 4000},
    "yarn without a factor": {**YARN, "factor": None},
}


def config_of(settings: dict[str, Any]) -> LlamaConfig:
    """A Llama with these rope settings."""
    rope = {"rope_theta": 10_000.0} | settings
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=rope
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_frequencies_and_tables_equal_those_of_transformers(settings: dict[str, Any]) -> None:
    """Frequencies, attention factor, cosines and sines of all positions have the same bits as in transformers."""
    config = config_of(settings)
    reference = LlamaRotaryEmbedding(config)
    positions = torch.arange(CONTEXT)

    rope = read_rope_config(config.to_dict())
    table = RotaryTable(HEAD_DIM, rope, CONTEXT, torch.device("cpu"))

    assert torch.equal(rotary_frequencies(HEAD_DIM, rope, CONTEXT), reference.inv_freq)
    assert rope.attention_factor == reference.attention_scaling
    expected = reference(torch.empty(0), positions[None])
    for ours, theirs in zip(table.at(positions), expected, strict=True):
        assert torch.equal(ours.squeeze(1), theirs.squeeze(0))


def test_ntk_by_length_changes_nothing_within_the_context() -> None:
    """Up to max_position_embeddings, which no request exceeds, the dynamic type equals the default one."""
    config = config_of({"rope_type": "dynamic", "factor": 2.5})
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=CONTEXT)
    beyond, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=CONTEXT + 1)

    ours = rotary_frequencies(HEAD_DIM, read_rope_config(config.to_dict()), CONTEXT)

    assert torch.equal(ours, expected)
    assert not torch.equal(ours, beyond)


def test_queries_are_rotated_in_fp32_and_rounded_once() -> None:
    """The rotation of bf16 values is the fp32 rotation, rounded once."""
    table = RotaryTable(HEAD_DIM, read_rope_config(config_of({}).to_dict()), CONTEXT, torch.device("cpu"))
    x = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos, sin = table.at(torch.tensor([0, 1, 7, 100, 511]))

    turned = table.rotate(x, cos, sin)

    pairs = torch.view_as_complex(torch.stack(x.double().chunk(2, dim=-1), dim=-1))
    exact = pairs * torch.complex(cos, sin)[..., : HEAD_DIM // 2]
    assert torch.equal(turned, torch.cat([exact.real, exact.imag], dim=-1).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(97, 56), (17, 33), (256, 128), (0, 32)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_gives_the_bits_of_the_plain_one(
    out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """A packed layer gives the same bits for any number of rows, and returns the same weight."""
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    layer = Linear(weight.clone(), bias)

    layer.pack()

    for num_rows in (1, 2, 7, 8, 31, 64):
        x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
        assert torch.equal(layer(x), functional.linear(x, weight, bias))
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.rows(3, 9)[0], weight[3:9])
