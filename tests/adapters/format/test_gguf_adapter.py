"""Tests of LoRA in llama.cpp's GGUF, against what PEFT makes of the folder from which it was converted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load as load_tensors
from safetensors.numpy import load_file

from graftwork.adapters.format.gguf_adapter import peft_files
from graftwork.adapters.format.gguf_file import read_gguf
from graftwork.adapters.format.layout import parse_adapter
from graftwork.platform.errors import ValidationFailed
from tests.adapters import adapter_files
from tests.adapters.adapter_files import config_bytes, tensors
from tests.adapters.format.gguf_files import Matrix, converted, gguf_bytes
from tests.adapters.registry.test_weights import ALL_TARGETS, base_model, load, peft_deltas

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # between the libraries

DESCRIPTION = replace(adapter_files.DESCRIPTION, head_dim=8)
GOOD = gguf_bytes(converted(tensors()))
VARIANTS: dict[str, dict[str, Any]] = {
    "all targets": {"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS},
    "ranks": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ALL_TARGETS,
        "rank_pattern": {"q_proj": 2, "1.mlp.up_proj": 7},
    },
    "one layer": {"r": 3, "lora_alpha": 5, "target_modules": ["k_proj"], "layers_to_transform": [1]},
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]},
}


def peft_folder(folder: Path, options: dict[str, Any]) -> dict[str, Matrix]:
    """Saves a random adapter with PEFT, and returns its tensors."""
    model = get_peft_model(base_model(), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return load_file(folder / "adapter_model.safetensors")


def read(content: bytes) -> tuple[bytes, bytes]:
    """Returns the two files that a GGUF file becomes."""
    files = peft_files(content, DESCRIPTION)
    return files.config, b"".join(files.weights(content))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_delta_of_every_module_is_that_of_peft(variant: str, architecture: str, tmp_path: Path) -> None:
    """What is loaded from GGUF adds to each matrix what PEFT adds, with the rows of q and k back in their order."""
    options = VARIANTS[variant]
    saved = peft_folder(tmp_path / "peft", options)
    config, weights = read(gguf_bytes(converted(saved, architecture), options["lora_alpha"], architecture))

    loaded = load(tmp_path / "artifacts", config, weights)

    expected = peft_deltas(tmp_path / "peft") if variant != "head" else {}
    for place, delta in expected.items():
        pair = loaded.pairs[place]
        torch.testing.assert_close(pair.scale * (pair.B @ pair.A), delta, rtol=1e-6, atol=1e-6)
    assert variant == "head" or set(loaded.pairs) == set(expected)
    assert load_tensors(weights).keys() == saved.keys()
    for name, tensor in load_tensors(weights).items():
        assert np.array_equal(tensor, saved[name]), name
    assert (loaded.head is not None) == (variant == "head")


def test_the_embedding_is_transposed_back() -> None:
    """A of the embedding, which llama.cpp stores transposed, has PEFT's shape and numbers again."""
    random = np.random.default_rng(0)
    saved = {
        "base_model.model.model.embed_tokens.lora_embedding_A": random.standard_normal((4, 64)).astype(np.float32),
        "base_model.model.model.embed_tokens.lora_embedding_B": random.standard_normal((32, 4)).astype(np.float32),
    }

    config, weights = read(gguf_bytes(converted(saved)))

    spec = parse_adapter(config, weights, DESCRIPTION)
    assert [module.target for module in spec.modules] == ["embed_tokens"]
    for name, tensor in load_tensors(weights).items():
        assert np.array_equal(tensor, saved[name])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_bits_and_the_scale_are_kept(dtype: Any) -> None:
    """Numbers are not rounded; alpha 0 is llama.cpp's scale of 1, also where ranks differ."""
    saved = {name: tensor.astype(dtype) for name, tensor in (tensors() | tensors(1, 2, ("k_proj",))).items()}

    config, weights = read(gguf_bytes(converted(saved), alpha=0.0))

    spec = parse_adapter(config, weights, DESCRIPTION)
    assert {module.target: module.scale for module in spec.modules} == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "down_proj"), 1.0
    )
    for name, tensor in load_tensors(weights).items():
        assert tensor.dtype == dtype
        assert np.array_equal(tensor, saved[name])


def without_alpha(content: bytes) -> bytes:
    return content.replace(b"adapter.lora.alpha", b"adapter.lora.omega")


CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a model": (lambda: gguf_bytes(converted(tensors()), kind="model"), "so it is no LoRA"),
    "another architecture": (lambda: gguf_bytes(converted(tensors()), architecture="mamba"), "is not read"),
    "aLoRA": (lambda: gguf_bytes(converted(tensors()), invocation=[1, 2]), "aLoRA"),
    "quantised": (lambda: gguf_bytes(converted(tensors(rank=32, targets=("q_proj",))), quantised=True), "quantised"),
    "a norm": (lambda: gguf_bytes({"blk.0.attn_norm.weight": np.ones(32, np.float32)}), "not the name of a LoRA"),
    "an expert": (
        lambda: gguf_bytes({"blk.0.ffn_gate_exps.weight.lora_a": np.ones((4, 32), np.float32)}),
        "not read from GGUF",
    ),
    "no matrix": (lambda: gguf_bytes({"blk.0.attn_q.weight.lora_a": np.ones(32, np.float32)}), "no matrix"),
    "odd rows": (
        lambda: gguf_bytes({"blk.0.attn_q.weight.lora_b": np.ones((12, 4), np.float32)}),
        "whole number of heads",
    ),
    "nothing": (lambda: gguf_bytes({}), "holds no lora_a"),
    "a negative alpha": (lambda: gguf_bytes(converted(tensors()), alpha=-1.0), "alpha"),
    "a later version": (lambda: GOOD[:4] + (9).to_bytes(4, "little") + GOOD[8:], "version 9"),
    "big-endian": (lambda: GOOD[:4] + (3).to_bytes(4, "big") + GOOD[8:], "little-endian"),
    "no GGUF": (lambda: b"GGML" + GOOD[4:], "no GGUF"),
    "many tensors": (lambda: GOOD[:8] + (2**40).to_bytes(8, "little") + GOOD[16:], "may have 4096"),
    "many pairs": (lambda: GOOD[:16] + (2**40).to_bytes(8, "little") + GOOD[24:], "may have 1024"),
}


def test_tensors_that_share_data_are_refused() -> None:
    """A small file must not grow: no two tensors may have the same bytes."""
    second = read_gguf(GOOD).tensors[1]
    name = second.name.encode()
    place = GOOD.index(name) + len(name) + 4 + 8 * len(second.shape) + 4  # behind the dimensions and the type

    with pytest.raises(ValidationFailed, match="shares data"):
        read(GOOD[:place] + bytes(8) + GOOD[place + 8 :])


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_read(case: str) -> None:
    """What is no LoRA, or could only be applied in part, is refused with its reason."""
    make, reason = CASES[case]

    with pytest.raises(ValidationFailed, match=reason) as refusal:
        read(make())
    assert (refusal.value.param or "").startswith("weights")


def test_an_engine_that_does_not_say_its_heads() -> None:
    """Without the size of the heads, q and k of llama cannot be put in order; other architectures need none."""
    silent = replace(DESCRIPTION, head_dim=None)
    with pytest.raises(ValidationFailed, match="upgrade the engine"):
        peft_files(GOOD, silent)

    assert peft_files(gguf_bytes(converted(tensors(), "qwen2"), architecture="qwen2"), silent).tensors


@given(end=st.integers(0, len(GOOD) - 1))
def test_a_truncated_file_is_refused(end: int) -> None:
    """A file that ends early, wherever, is refused."""
    with pytest.raises(ValidationFailed):
        read(GOOD[:end])


HEADER_BYTES = read_gguf(GOOD).tensors[0].start


@given(position=st.integers(0, HEADER_BYTES - 1), byte=st.integers(0, 255))
def test_a_changed_header_is_refused_or_read(position: int, byte: int) -> None:
    """Whatever byte of the header is changed, the file is refused or read within its bounds; nothing else happens."""
    content = GOOD[:position] + bytes([byte]) + GOOD[position + 1 :]
    try:
        config, weights = read(content)
    except ValidationFailed:
        return

    assert json.loads(config)["peft_type"] == "LORA"
    assert load_tensors(weights)


def test_equal_adapters_have_one_digest(tmp_path: Path) -> None:
    """A folder of PEFT and its conversion to GGUF are one adapter: their files have one digest."""
    from graftwork.adapters.format.identity import identify_adapter

    peft = adapter_files.weights_bytes(tensors())
    _, of_folder = identify_adapter(config_bytes(), peft, DESCRIPTION)
    _, of_gguf = identify_adapter(*read(GOOD), DESCRIPTION)

    assert of_folder == of_gguf
