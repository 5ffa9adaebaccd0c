"""Models with several residual streams: how their files hold them, and adapters of what mixes the streams."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId
from tests.engine.families import ADAPTER, FAMILIES, Family, make_family
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, of_one_row, recorded, with_tensors

PEFT_LAYER = "base_model.model.model.layers"
MIXING = (
    *("modality_router", "prediction_coefs", "correction_coefs", "altup_projections.1"),
    *("altup_unembed_projections.0", "per_layer_model_projection"),
)


def test_a_language_model_is_served_out_of_one_that_sees_and_hears(tmp_path: Path) -> None:
    """From a checkpoint as published, with other parts, and with keys and values that layers read from others, the logits
    are those of the language model alone."""
    family, other = make_family(FAMILIES["gemma3n"], tmp_path, ()), torch.ones(3, 5)
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "vision_config": {"a": 1}}

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        inner = {name: tensors.pop(name) for name in [*tensors]}
        unused = {f"model.layers.4.self_attn.{name}.weight": other.clone() for name in ("k_proj", "v_proj", "k_norm")}
        for name, tensor in (inner | unused).items():
            tensors[name.replace("model.", "model.language_model.", 1)] = tensor
        tensors["model.vision_tower.timm_model.conv.weight"] = other.clone()
        tensors["model.embed_audio.a"] = other.clone()

    folder = with_tensors(family, tmp_path / "whole", wrap)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    prompt = random_prompt(Random(3), 21)

    whole = of_one_row(Family(folder, {}).engine(), prompt, None)

    assert torch.equal(whole, of_one_row(family.engine(), prompt, None))
    unknown = "model.language_model.layers.4.self_attn.x_proj.weight"
    save_file(load_file(folder / "model.safetensors") | {unknown: other}, folder / "model.safetensors")
    with pytest.raises(InvalidRequest, match=r"layers\.4\.self_attn\.x_proj"):
        Family(folder, {}).engine()


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_each_layer_that_mixes_streams_may_have_an_adapter_of_its_own(tmp_path: Path, use_dora: bool) -> None:
    """In one batch, an adapter of one of these layers alone has peft's logits, which are not those of the model. So has one
    of the table of inputs, also for a token beyond it."""
    targets = MIXING if use_dora else (*MIXING, "embed_tokens_per_layer")
    options = {target: {"r": 3, "use_dora": use_dora, "target_modules": [target]} for target in targets}
    family, prompt = (
        make_family(FAMILIES["gemma3n-wide"], tmp_path, targets, options),
        [*random_prompt(Random(8), 14), 95],
    )
    driver = family.engine(max_running=len(targets) + 1)
    driver.warm(*targets)
    recorder, asked = recorded(driver), dict[RequestId, Any]()

    for use in (None, *targets):
        driver.submit(prompt, adapter=use, max_tokens=3, ignore_eos=True)
        asked[[*driver.outcomes][-1]] = (prompt, use)
    driver.finish()

    assert len(recorder.rows) == 3 * len(asked)
    check_rows(recorder, driver, family, asked)
    first = {asked[piece.request_id][1]: row for piece, row in recorder.rows if piece.end == len(prompt)}
    plain = first.pop(None)
    assert all((row - plain).abs().max() > 1e-2 for row in first.values())


def test_an_adapter_of_keys_that_a_layer_reads_from_another_has_no_effect_there(tmp_path: Path) -> None:
    """Older versions of transformers gave such layers projections that they never called. An adapter that has factors for
    them has the logits that it has without them, which are peft's."""
    family = make_family(FAMILIES["gemma3n"], tmp_path, (ADAPTER,))
    path, prompt = tmp_path / "adapters" / ADAPTER / "adapter_model.safetensors", random_prompt(Random(4), 21)
    tensors = load_file(path)
    factors = {
        f"{name}.lora_{letter}": tensors[f"{PEFT_LAYER}.1.self_attn.{name}.lora_{letter}.weight"]
        for name in ("k_proj", "v_proj")
        for letter in "AB"
    }
    assert not any("layers.3.self_attn.k_proj" in name for name in tensors)

    without = of_one_row(family.engine(), prompt, ADAPTER)
    save_file(tensors | {f"{PEFT_LAYER}.3.self_attn.{name}.weight": factors[name].clone() for name in factors}, path)
    with_unused = of_one_row(family.engine(), prompt, ADAPTER)

    assert torch.equal(with_unused, without)
    with torch.inference_mode():
        expected = family.references[ADAPTER](torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(with_unused, expected, atol=1e-4, rtol=1e-4)
