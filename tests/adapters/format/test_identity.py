"""Tests of the digest: two adapters have one digest exactly if the engine computes the same with both."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.adapters.format.identity import identify_adapter, is_digest
from graftwork.engine.core.stats import EngineDescription
from graftwork.platform.errors import ValidationFailed
from tests.adapters.adapter_files import (
    DESCRIPTION,
    PREFIX,
    Q0_A,
    Tensors,
    config_bytes,
    container,
    entries,
    tensors,
    weights_bytes,
)
from tests.hypothesis_profiles import examples


def digest(
    found: Tensors | None = None, description: EngineDescription = DESCRIPTION, weights: bytes = b"", **config: Any
) -> str:
    return identify_adapter(config_bytes(**config), weights or weights_bytes(found), description)[1]


ORIGINAL = digest()


def test_the_form_of_a_digest() -> None:
    """Only a text of the digest's form, which is safe as a folder's name, is a digest."""
    assert is_digest(ORIGINAL)
    for text in ("", "sha256:", "../x", ORIGINAL.upper(), ORIGINAL + "0", ORIGINAL + "\n", ORIGINAL[7:]):
        assert not is_digest(text)


def test_what_does_not_change_the_computation_does_not_change_the_digest() -> None:
    """Other names, order, padding, metadata or spellings of the config leave the digest as it is."""
    header, data = entries(tensors())
    padded = json.dumps({"__metadata__": {"format": "pt"}} | header).encode() + b"  "
    renamed = {name.replace("base_model.model.", ""): tensor for name, tensor in tensors().items()}

    same = [
        digest(dict(reversed(tensors().items()))),
        digest(renamed),
        digest(weights=container(padded, data)),
        digest(target_modules="all-linear", peft_version="0.1", base_model_name_or_path="x"),
        digest(lora_alpha=1, alpha_pattern={".*": 8}),
        digest(lora_alpha=4, use_rslora=True),
        digest(base_fingerprint=DESCRIPTION.fingerprint),
    ]

    assert set(same) == {ORIGINAL}


def test_what_changes_the_computation_changes_the_digest() -> None:
    """A change of the scale, the base, a tensor's bit, its format or its module changes the digest."""
    flipped = tensors()
    flipped[Q0_A].view(np.uint32)[0, 0] ^= 1
    negative_zero = tensors()
    negative_zero[Q0_A][0, 0] = -0.0
    zero = tensors()
    zero[Q0_A][0, 0] = 0.0
    halves = {name: tensor.astype(np.float16) for name, tensor in tensors().items()}
    brains = {name: tensor.view(np.uint16) for name, tensor in halves.items()}
    swapped = {
        name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1."): t for name, t in tensors().items()
    }
    fewer = {name: tensor for name, tensor in tensors().items() if ".1.mlp" not in name}

    others = [
        digest(lora_alpha=9),
        digest(use_rslora=True),
        digest(alpha_pattern={"v_proj": 9}),
        digest(description=replace(DESCRIPTION, fingerprint="sha256:" + "c" * 64)),
        *map(digest, (flipped, negative_zero, zero, halves, brains, swapped, fewer)),
    ]

    assert len({ORIGINAL, *others}) == len(others) + 1


def test_modules_of_equal_shape_are_told_apart() -> None:
    """The same bytes on another target have another digest."""
    k = tensors(targets=("k_proj",))
    v = {name.replace("k_proj", "v_proj"): t for name, t in k.items()}

    assert digest(k, target_modules=None) != digest(v, target_modules=None)


def effect(config: bytes, weights: bytes) -> dict[tuple[int | None, str], tuple[float, bytes, bytes]]:
    """Returns what an engine would apply: the scale and the bits of both factors by module."""
    spec, _ = identify_adapter(config, weights, DESCRIPTION)
    return {
        (m.layer, m.target): (m.scale, m.A.bits(weights).tobytes(), m.B.bits(weights).tobytes()) for m in spec.modules
    }


SMALL = {name: tensor for name, tensor in tensors(targets=("q_proj",)).items() if name.startswith(f"{PREFIX}.0")}
CONFIG, WEIGHTS = config_bytes(target_modules=["q_proj"]), weights_bytes(SMALL)
HEADER_END = len(WEIGHTS) - sum(tensor.nbytes for tensor in SMALL.values())


@settings(max_examples=examples(400))
@given(data=st.data())
def test_corruption_never_passes_silently(data: st.DataObject) -> None:
    """A damaged file is refused, has another digest, or has exactly the effect that it had before."""
    pair = {"config": bytearray(CONFIG), "weights": bytearray(WEIGHTS)}
    which = data.draw(st.sampled_from(["config", "weights", "header"]))
    raw = pair["config" if which == "config" else "weights"]
    positions = st.integers(0, HEADER_END - 1 if which == "header" else len(raw) - 1)
    match data.draw(st.sampled_from(["flip", "replace", "cut", "insert", "remove"])):
        case "flip":
            raw[data.draw(positions)] ^= 1 << data.draw(st.integers(0, 7))
        case "replace":
            raw[data.draw(positions)] = data.draw(st.sampled_from(list(b'0123456789"{}[],:. -eEnu\x00\xff')))
        case "cut":
            del raw[data.draw(positions) :]
        case "insert":
            raw.insert(data.draw(positions), data.draw(st.integers(0, 255)))
        case "remove":
            del raw[data.draw(positions)]
    config, weights = bytes(pair["config"]), bytes(pair["weights"])

    try:
        _, found = identify_adapter(config, weights, DESCRIPTION)
    except ValidationFailed:
        return

    same_effect = effect(config, weights) == effect(CONFIG, WEIGHTS)
    assert (found == identify_adapter(CONFIG, WEIGHTS, DESCRIPTION)[1]) == same_effect


@pytest.mark.parametrize("position", [*range(9), HEADER_END - 1, HEADER_END, HEADER_END + 1])
def test_a_flipped_byte_at_a_border_is_refused_or_seen(position: int) -> None:
    """A flipped byte at each border of length, header and data is refused or changes the digest."""
    damaged = bytearray(WEIGHTS)
    damaged[position] ^= 0x01

    try:
        _, found = identify_adapter(CONFIG, bytes(damaged), DESCRIPTION)
    except ValidationFailed:
        return
    assert found != identify_adapter(CONFIG, WEIGHTS, DESCRIPTION)[1]
