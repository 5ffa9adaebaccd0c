"""Tests of `adapters verify`, which needs only the files and the base model's folder."""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from tests.adapters.format.gguf_files import converted, gguf_bytes
from tests.api.cli.conftest import Graftwork

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
SHAPE = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A base model as far as an adapter's check looks at it."""
    folder = tmp_path / "base"
    folder.mkdir()
    facts = {"architectures": ["LlamaForCausalLM"], "vocab_size": 32, "num_hidden_layers": 1}
    config = SHAPE | facts | {"max_position_embeddings": 64, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"unread": numpy.zeros(1, dtype=numpy.float32)}, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, out_features: int) -> Path:
    """A LoRA on q_proj, whose B fits the model where `out_features` is 8."""
    folder.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    A, B = numpy.ones((2, 8), dtype=numpy.float32), numpy.ones((out_features, 2), dtype=numpy.float32)
    save_file({f"{prefix}.lora_A.weight": A, f"{prefix}.lora_B.weight": B}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_good_adapter_is_described(graftwork: Graftwork, model: Path, tmp_path: Path) -> None:
    """A good adapter is printed with rank, targets and digest, with status 0."""
    folder = write_adapter(tmp_path / "good", out_features=8)

    result = graftwork("adapters", "verify", str(folder), "--model", str(model), "--json")

    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["ok"], report["rank"], report["target_modules"]) == (True, 2, ["q_proj"])
    assert report["digest"].startswith("sha256:")


def test_a_bad_tensor_is_named(graftwork: Graftwork, model: Path, tmp_path: Path) -> None:
    """A tensor that does not fit is named, with status 1."""
    folder = write_adapter(tmp_path / "bad", out_features=9)

    result = graftwork("adapters", "verify", str(folder), "--model", str(model))

    assert result.exit_code == 1
    assert "q_proj.lora_B.weight" in result.stderr


def test_a_missing_file_is_named(graftwork: Graftwork, model: Path, tmp_path: Path) -> None:
    """An empty folder is refused with the missing file."""
    result = graftwork("adapters", "verify", str(tmp_path), "--model", str(model))

    assert result.exit_code == 1
    assert "adapter_config.json cannot be read" in result.stderr


def test_the_base_is_never_guessed(
    graftwork: Graftwork, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's GRAFTWORK_MODEL is taken and shown; without any, the command asks for one."""
    folder = write_adapter(tmp_path / "good", out_features=8)

    asked = graftwork("adapters", "verify", str(folder))
    monkeypatch.setenv("GRAFTWORK_MODEL", str(model))
    taken = graftwork("adapters", "verify", str(folder))

    assert asked.exit_code == 1
    assert "--model" in asked.stderr
    assert taken.exit_code == 0, taken.output
    assert f"base ({model})" in taken.stdout


def test_a_gguf_file_is_the_same_adapter(graftwork: Graftwork, model: Path, tmp_path: Path) -> None:
    """A GGUF file has the digest of the folder from which it was made; a file that is none is refused."""
    folder = write_adapter(tmp_path / "good", out_features=8)
    saved = load_file(folder / "adapter_model.safetensors")
    (tmp_path / "good.gguf").write_bytes(gguf_bytes(converted(saved), alpha=4.0))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")

    of_folder, of_file = (
        json.loads(graftwork("adapters", "verify", str(path), "--model", str(model), "--json").stdout)
        for path in (folder, tmp_path / "good.gguf")
    )
    refused = graftwork("adapters", "verify", str(tmp_path / "bad.gguf"), "--model", str(model))

    assert of_file["digest"] == of_folder["digest"]
    assert "truncated" in refused.output
