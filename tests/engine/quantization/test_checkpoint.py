"""Weights are read from published forms bit by bit as their libraries compute them, and what does not fit is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftwork.engine.model.config import ModelConfig, read_model_config
from graftwork.engine.model.weights import load_decoder_weights, open_weights
from graftwork.engine.quantization.weight import QuantizedWeight
from graftwork.platform.errors import InvalidRequest
from tests.engine.quantization.checkpoints import (
    FORMS,
    Checkpoint,
    awq,
    change_config,
    compressed_float8,
    gptq,
    packed_integers,
    write,
)

CheckpointOf = Callable[[str], Checkpoint]
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights_are_those_of_the_library(name: str, dtype: torch.dtype, checkpoint_of: CheckpointOf) -> None:
    """Every layer of every form becomes, bit by bit, the weights that its own library computes."""
    made = checkpoint_of(name)
    config = read_model_config(made.folder)
    weights = load_decoder_weights(open_weights(made.folder, config), config, CPU, dtype)

    for module, dense in made.dense.items():
        layer, target = int(module.split(".")[2]), module.rpartition(".")[2]
        found, _ = weights.module(layer, target)
        assert torch.equal(found, dense.to(dtype)), module


@pytest.mark.parametrize("name", FORMS)
def test_torch_makes_the_same_weights_dense(name: str, checkpoint_of: CheckpointOf) -> None:
    """Without the compiled kernel, torch makes the same weights dense."""
    made = checkpoint_of(name)
    config = read_model_config(made.folder)
    reader = open_weights(made.folder, config)

    for module, dense in made.dense.items():
        weight = reader.linear(module, config.target_shapes[module.rpartition(".")[2]])
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.dense(torch.bfloat16), dense.to(torch.bfloat16)), module
        whole = weight.dense(torch.float32)
        assert torch.equal(weight.rows(8, 24).dense(torch.float32), whole[8:24])


def test_quantised_bytes_are_counted(checkpoint_of: CheckpointOf) -> None:
    """The bytes of int4 layers are those of codes and scales: a quarter of bf16 and a scale for each group."""
    made = checkpoint_of("packed int4")
    config = read_model_config(made.folder)
    layer = load_decoder_weights(open_weights(made.folder, config), config, CPU, torch.bfloat16).layers[0]

    assert layer.group("down").num_bytes == 64 * (384 // 2 + 4 * 384 // 32)  # 320 input features are padded to 384


def test_excluded_layers_stay_plain(plain: Path, tmp_path: Path) -> None:
    """A layer that quantization_config excludes is read as a plain one beside quantised ones."""
    form = awq()
    made = write(form, plain, tmp_path, skip=("v_proj", "down_proj"))
    change_config(
        made.folder, quantization_config=form.config | {"modules_to_not_convert": ["v_proj", "mlp.down_proj"]}
    )
    config = read_model_config(made.folder)
    weights = load_decoder_weights(open_weights(made.folder, config), config, CPU, torch.float32)

    stored = load_file(plain / "model.safetensors")
    found, _ = weights.module(1, "v_proj")
    assert torch.equal(found, stored["model.layers.1.self_attn.v_proj.weight"])
    found, _ = weights.module(1, "q_proj")
    assert torch.equal(found, made.dense["model.layers.1.self_attn.q_proj"])


def test_biases_of_zero_are_skipped_and_others_refused(plain: Path, tmp_path: Path) -> None:
    """A bias that the model has not is read over if it is zero, as old GPTQ checkpoints have it, and refused if not."""
    made = write(gptq(), plain, tmp_path)
    path, name = made.folder / "model.safetensors", "model.layers.0.self_attn.o_proj.bias"
    config = read_model_config(made.folder)
    save_file(load_file(path) | {name: torch.zeros(64, dtype=torch.float16)}, path, {"format": "pt"})
    load_decoder_weights(open_weights(made.folder, config), config, CPU, torch.float32)

    save_file(load_file(path) | {name: torch.ones(64, dtype=torch.float16)}, path, {"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"o_proj.bias.*not zero"):
        load_decoder_weights(open_weights(made.folder, config), config, CPU, torch.float32)


def _load(folder: Path) -> ModelConfig:
    config = read_model_config(folder)
    load_decoder_weights(open_weights(folder, config), config, CPU, torch.float32)
    return config


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"scales": None}, r"no tensor '.*q_proj.scales'"),
        ("gptq", {"qweight": None}, r"no tensor '.*q_proj.qweight'"),
        ("gptq desc_act", {"g_idx": None}, r"no tensor '.*q_proj.g_idx'"),
        ("gptq", {"scales": torch.ones(4, 64)}, r"q_proj.scales' has shape \(4, 64\), not \(2, 64\)"),
        ("gptq", {"scales": torch.full((2, 64), torch.inf)}, "infinite or no number"),
        ("gptq", {"g_idx": torch.zeros(64, dtype=torch.int32)}, "does not give each group 32 input features"),
        ("awq", {"qweight": torch.zeros(64, 8)}, r"q_proj.qweight' is of torch.float32, not torch.int32"),
        ("packed int4", {"weight_shape": torch.tensor([64, 32])}, r"weight_shape' is \[64, 32\], not \[64, 64\]"),
        ("packed int4", {"weight_scale": None}, r"no tensor '.*q_proj.weight_scale'"),
        ("fp8 channels", {"weight": torch.zeros(64, 64)}, "is of torch.float32, not torch.float8_e4m3fn"),
        ("fp8 channels", {"weight": torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)}, "that is no number"),
        ("fp8 channels", {"weight_zero": torch.zeros(1)}, "tensors that its config.json has no use for"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, changes: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    """A missing, surplus or misshapen tensor of a quantised layer is refused by its name."""
    made = write(FORMS[name], plain, tmp_path)
    path = made.folder / "model.safetensors"
    tensors = load_file(path)
    for last, tensor in changes.items():
        tensors.pop(f"{Q_PROJ}.{last}", None)
        tensors |= {} if tensor is None else {f"{Q_PROJ}.{last}": tensor}
    save_file(tensors, path, {"format": "pt"})

    with pytest.raises(InvalidRequest, match=message):
        _load(made.folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq().config | {"bits": 3}, "bits 3 is not served for gptq; served is 4 or 8"),
        (gptq().config | {"group_size": 48}, "group_size 48 is not served"),
        (gptq().config | {"group_size": 128}, r"group_size 128 does not divide the 64 input features of .*q_proj"),
        (gptq().config | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not served"),
        (gptq().config | {"new_rule": 1}, "new_rule 1 is no setting that is served for gptq"),
        ({k: v for k, v in gptq().config.items() if k != "bits"}, "'bits'"),
        (awq().config | {"version": "gemv"}, "version 'gemv' is not served for awq"),
        (awq().config | {"zero_point": False}, "zero_point False is not served"),
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not served; served is one of gptq"),
        (packed_integers().config | {"format": "marlin-24"}, "format 'marlin-24' is not served"),
        (packed_integers().config | {"quantization_status": "frozen"}, "quantization_status 'frozen' is not served"),
        (packed_integers().config | {"config_groups": {}}, "0 config_groups are not served"),
        (compressed_float8().config | {"format": "int-quantized"}, "does not belong to the format"),
        ([], None),
        ("gptq", "must be an object"),
    ],
)
def test_settings_that_are_not_served_are_refused(
    config: Any, message: str | None, plain: Path, tmp_path: Path
) -> None:
    """A quantization_config with a value that is not served, or a setting that is not known, is refused by name."""
    made = write(gptq(), plain, tmp_path)
    change_config(made.folder, quantization_config=config)

    if message is None:  # an empty setting is none, so the tensors are those of another model
        message = "no tensor 'model.layers.0.self_attn.q_proj.weight'"
    with pytest.raises(InvalidRequest, match=message):
        _load(made.folder)
