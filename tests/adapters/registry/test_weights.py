"""Tests of artifacts as matrices against what peft makes of the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.platform.errors import NotFound, ValidationFailed
from tests.adapters.adapter_files import (
    DESCRIPTION,
    config_bytes,
    container,
    entries,
    store_files,
    tensors,
    weights_bytes,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # between the libraries

ALL_TARGETS = list(DESCRIPTION.target_shapes)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS},
    "rslora": {"r": 8, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]},
    "odd rank": {"r": 3, "lora_alpha": 7, "target_modules": ["k_proj", "o_proj"]},
    "one module": {"r": 1, "lora_alpha": 1, "target_modules": ["v_proj"]},
    "all-linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    "regular expression": {"r": 2, "lora_alpha": 4, "target_modules": r".*layers\.1\.mlp\.(gate|down)_proj"},
    "one layer": {"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS, "layers_to_transform": [1]},
    "one layer by number": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "layers_to_transform": 0},
    "without some": {"r": 4, "lora_alpha": 8, "target_modules": ALL_TARGETS, "exclude_modules": ["0.mlp.up_proj"]},
    "rank pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL_TARGETS,
        "rank_pattern": {
            "layers.0.self_attn.q_proj": 2,
            "^model.layers.1.mlp.down_proj": 7,
            "q_proj": 5,
            r".*\.1\..*up_proj": 3,
        },
    },
    "alpha pattern": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL_TARGETS,
        "alpha_pattern": {"layers.1.self_attn.k_proj": 3, "k_proj": 5.5, r"layers\.\d\.mlp\.(gate|up)_proj": 16},
    },
    "everything": {
        "r": 6,
        "lora_alpha": 9,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "layers_to_transform": [0, 1],
        "rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\..*": 11},
        "alpha_pattern": {r"1\.self_attn\.v_proj": 1, "down_proj": 20},
    },
}


def base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


@pytest.fixture(scope="module")
def peft_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every variant as peft saves it, with random factors."""
    torch.set_num_threads(1)
    folders = {}
    for seed, (name, options) in enumerate(VARIANTS.items()):
        model = get_peft_model(base_model(), LoraConfig(task_type="CAUSAL_LM", **options))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_()
        folders[name] = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(str(folders[name]))
    return folders


def load(root: Path, config: bytes, weights: bytes) -> AdapterWeights:
    _, digest = identify_adapter(config, weights, DESCRIPTION)
    store_files(LocalArtifacts(root), digest, config, weights)
    return ArtifactAdapterSource(LocalArtifacts(root), DESCRIPTION).load(digest)


def peft_deltas(folder: Path) -> dict[tuple[int, str], torch.Tensor]:
    """What peft adds to each base matrix once it has loaded the folder."""
    model = PeftModel.from_pretrained(base_model(), folder)
    deltas = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            parts = name.split(".")
            deltas[int(parts[parts.index("layers") + 1]), parts[-1]] = module.get_delta_weight("default").detach()
    return deltas


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_delta_of_every_module_is_that_of_peft(variant: str, peft_folders: dict[str, Path], tmp_path: Path) -> None:
    """Each module's delta equals that of peft to 1e-6, for every way to set rank, scale and target."""
    folder = peft_folders[variant]
    config = (folder / "adapter_config.json").read_bytes()
    weights = (folder / "adapter_model.safetensors").read_bytes()

    loaded = load(tmp_path, config, weights)

    expected = peft_deltas(folder)
    assert set(loaded.pairs) == set(expected)
    for place, pair in loaded.pairs.items():
        delta = pair.scale * (pair.B @ pair.A)
        torch.testing.assert_close(delta, expected[place], rtol=1e-6, atol=1e-6)
        assert delta.abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matrices_keep_the_dtype_and_the_bits_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Loaded matrices have the dtype and the bits that safetensors reads."""
    saved = {name: tensor.to(dtype) for name, tensor in load_tensors(weights_bytes()).items()}

    loaded = load(tmp_path, config_bytes(), save(saved))

    prefix = "base_model.model.model.layers.1.self_attn.v_proj"
    pair = loaded.pairs[1, "v_proj"]
    assert torch.equal(pair.A, saved[f"{prefix}.lora_A.weight"])
    assert torch.equal(pair.B, saved[f"{prefix}.lora_B.weight"])
    assert (pair.A.dtype, pair.scale, pair.rank) == (dtype, 2.0, 4)


def test_matrices_are_their_own(tmp_path: Path) -> None:
    """Loaded matrices outlive their artifact, and a write to one changes no other."""
    _, digest = identify_adapter(config_bytes(), weights_bytes(), DESCRIPTION)
    store, source = LocalArtifacts(tmp_path), ArtifactAdapterSource(LocalArtifacts(tmp_path), DESCRIPTION)
    store_files(store, digest, config_bytes(), weights_bytes())

    first, second = source.load(digest), source.load(digest)
    first.pairs[0, "q_proj"].A.zero_()
    store.delete(digest)

    assert second.pairs[0, "q_proj"].A.abs().min() > 0


def test_an_unknown_digest_is_not_found(tmp_path: Path) -> None:
    """An unknown digest, or a text that is not a digest, is a NotFound."""
    source = ArtifactAdapterSource(LocalArtifacts(tmp_path), DESCRIPTION)

    for digest in ("sha256:" + "0" * 64, "../../etc"):
        with pytest.raises(NotFound):
            source.load(digest)


@pytest.mark.parametrize("damage", ["bit", "truncated", "config", "swapped", "emptied"])
def test_files_that_changed_since_the_upload_are_refused_by_their_digest(damage: str, tmp_path: Path) -> None:
    """Each load checks the digest of the bytes it uses, and refuses files that have changed."""
    _, digest = identify_adapter(config_bytes(), weights_bytes(), DESCRIPTION)
    store_files(LocalArtifacts(tmp_path), digest, config_bytes(), weights_bytes())
    paths = LocalArtifacts(tmp_path).open(digest)
    weights = bytearray(weights_bytes())
    match damage:
        case "bit":
            weights[-1] ^= 1
            paths.weights.write_bytes(weights)
        case "truncated":
            paths.weights.write_bytes(weights[:-4])
        case "config":
            paths.config.write_bytes(config_bytes(lora_alpha=16))
        case "swapped":
            paths.weights.write_bytes(weights_bytes({}))
        case "emptied":
            paths.config.write_bytes(b"")

    with pytest.raises(ValidationFailed) as caught:
        ArtifactAdapterSource(LocalArtifacts(tmp_path), DESCRIPTION).load(digest)

    assert digest in caught.value.message
    assert caught.value.code == "artifact_damaged"


@pytest.mark.parametrize("padding", range(4))
def test_tensors_at_odd_offsets_are_read_as_safetensors_reads_them(padding: int, tmp_path: Path) -> None:
    """Tensors at unaligned offsets are read as safetensors reads them."""
    header, data = entries(tensors())
    weights = container(json.dumps(header).encode() + b" " * padding, data)

    loaded = load(tmp_path, config_bytes(), weights)

    expected = load_tensors(weights_bytes())
    for (layer, target), pair in loaded.pairs.items():
        parent = "mlp" if target == "down_proj" else "self_attn"
        prefix = f"base_model.model.model.layers.{layer}.{parent}.{target}"
        assert torch.equal(pair.A, expected[f"{prefix}.lora_A.weight"])
        assert torch.equal(pair.B, expected[f"{prefix}.lora_B.weight"])


def test_adapters_of_equal_size_and_config_are_told_apart(tmp_path: Path) -> None:
    """A source that loads two adapters of equal size and config in turn does not mix them up."""
    store, source = LocalArtifacts(tmp_path), ArtifactAdapterSource(LocalArtifacts(tmp_path), DESCRIPTION)
    files = {}
    for targets in (("q_proj",), ("o_proj",)):
        weights = weights_bytes(tensors(targets=targets))
        _, digest = identify_adapter(config_bytes(target_modules=None), weights, DESCRIPTION)
        store_files(store, digest, config_bytes(target_modules=None), weights)
        files[digest] = {(0, targets[0]), (1, targets[0])}

    for digest in [*files, *files]:
        assert set(source.load(digest).pairs) == files[digest]
