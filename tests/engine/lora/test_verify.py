"""Tests of the probe that an adapter passes before it is served."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftwork.engine.build.devices import load_weights
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.lora import verify
from graftwork.engine.lora.fuse import build_resident
from graftwork.engine.lora.packs import PackCache
from graftwork.engine.lora.segments import Segment
from graftwork.engine.lora.torch_backend import LoraBatch, TorchLora
from graftwork.engine.lora.verify import AdapterTester, ProbeDevice
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.engine.model.batch_invariance import BatchInvariance
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.projections import MODEL_LAYER
from graftwork.engine.model.weights import DecoderWeights
from graftwork.platform.errors import ValidationFailed
from tests.engine.adapter_kinds import KINDS, AdapterKinds, make_adapter_kinds
from tests.engine.families import FAMILIES, PeftFolders, make_family
from tests.engine.families import KINDS as FAMILY_KINDS
from tests.engine.random_models import make_base

CPU = torch.device("cpu")
KINDS_OF_STREAMS = {
    "dora": FAMILY_KINDS["dora"],
    "inputs": {"r": 3, "target_modules": ["embed_tokens_per_layer", "linear_left"]},
}


@pytest.fixture(scope="module")
def adapter_kinds(tmp_path_factory: pytest.TempPathFactory) -> AdapterKinds:
    return make_adapter_kinds(make_base(tmp_path_factory.mktemp("probe") / "base"))


def base_of(adapter_kinds: AdapterKinds, dtype: torch.dtype) -> DecoderWeights:
    return load_weights(
        EngineConfig(adapter_kinds.base), read_model_config(adapter_kinds.base), torch.device("cpu"), dtype
    )


def prober_of(base: DecoderWeights, dtype: torch.dtype) -> AdapterTester:
    rules = BatchInvariance.of(dtype)
    where = ProbeDevice(CPU, lambda: TorchLora(PackCache(0, rules.min_columns), rules), row_counts=(5,))
    return AdapterTester(base, dtype, where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rank-3", "rank-128", *KINDS])
def test_an_adapter_that_is_built_right_passes(adapter_kinds: AdapterKinds, name: str, dtype: torch.dtype) -> None:
    """An adapter of every served kind passes the probe."""
    base, weights = base_of(adapter_kinds, dtype), adapter_kinds.weights[name]

    prober_of(base, dtype).test(weights, build_resident(weights, base, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_several_streams_are_probed(tmp_path: Path, dtype: torch.dtype) -> None:
    """An adapter of all linear layers and of the table of inputs passes, and one with another matrix in a narrow layer,
    beside the layers or in the table is named."""
    family = make_family(FAMILIES["gemma3n-wide"], tmp_path, ("dora", "inputs"), KINDS_OF_STREAMS)
    model = read_model_config(family.folder)
    base = load_weights(EngineConfig(family.folder), model, CPU, dtype)
    source = PeftFolders(tmp_path / "adapters", family.engine().engine.description)
    dora, inputs = source.load("dora"), source.load("inputs")
    prober = prober_of(base, dtype)

    for weights in (dora, inputs):
        prober.test(weights, build_resident(weights, base, dtype))

    for key in ((1, "prediction_coefs"), (4, "modality_router"), (MODEL_LAYER, "altup_unembed_projections.1")):
        other = replace(dora, pairs=dora.pairs | {key: replace(dora.pairs[key], B=-dora.pairs[key].B)})
        with pytest.raises(ValidationFailed, match=key[1]):
            prober.test(dora, build_resident(other, base, dtype))
    assert inputs.input_embedding is not None
    other = replace(inputs, input_embedding=replace(inputs.input_embedding, B=-inputs.input_embedding.B))
    with pytest.raises(ValidationFailed, match="embed_tokens_per_layer"):
        prober.test(inputs, build_resident(other, base, dtype))


def turned(weights: AdapterWeights, part: str) -> AdapterWeights:
    """Returns the same adapter with the sign of one matrix changed."""
    match part:
        case "embedding" | "head":
            pair = getattr(weights, part)
            return replace(weights, **{part: replace(pair, B=-pair.B)})
        case "saved_embedding" | "saved_head":
            return replace(weights, **{part: -getattr(weights, part)})
    pair = weights.pairs[1, part]
    return replace(weights, pairs=weights.pairs | {(1, part): replace(pair, B=-pair.B)})


@pytest.mark.parametrize(
    ("name", "part", "word"),
    [
        ("rank-8", "down_proj", "layer 1, down_proj"),
        ("rank-8", "k_proj", "layer 1, q_proj, k_proj"),
        ("dora", "up_proj", "layer 1, gate_proj"),
        ("lora-bias", "q_proj", "layer 1, q_proj"),
        ("embedding", "embedding", "embed_tokens"),
        ("head", "head", "lm_head"),
        ("saved", "saved_embedding", "embed_tokens"),
        ("saved", "saved_head", "lm_head"),
    ],
)
def test_an_adapter_that_is_built_from_other_matrices_is_named(
    adapter_kinds: AdapterKinds, name: str, part: str, word: str
) -> None:
    """The probe names the layer whose matrix differs from the file."""
    base = base_of(adapter_kinds, torch.float32)
    resident = build_resident(turned(adapter_kinds.weights[name], part), base, torch.float32)

    with pytest.raises(ValidationFailed, match=word) as caught:
        prober_of(base, torch.float32).test(adapter_kinds.weights[name], resident)
    assert caught.value.code == "adapter_probe_failed"


class DeafLora(TorchLora):
    """A backend that applies no adapter."""

    def step(self, segments: Sequence[Segment], num_rows: int) -> LoraBatch:
        return super().step([], num_rows)


def test_the_backend_that_serves_is_tested(adapter_kinds: AdapterKinds) -> None:
    """Right matrices do not pass if the given backend does not apply them."""
    base, weights, rules = base_of(adapter_kinds, torch.float32), adapter_kinds.weights["rank-8"], BatchInvariance(1, 1)
    deaf = AdapterTester(base, torch.float32, ProbeDevice.of(CPU, lambda: DeafLora(PackCache(0, 1), rules)))

    with pytest.raises(ValidationFailed, match="layer 0"):
        deaf.test(weights, build_resident(weights, base, torch.float32))


def test_the_reference_in_pieces_is_the_reference(adapter_kinds: AdapterKinds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same adapters pass and fail if the weights are read a few rows at a time."""
    monkeypatch.setattr(verify, "REFERENCE_VALUES", 200)
    base, weights = base_of(adapter_kinds, torch.float32), adapter_kinds.weights["dora"]
    prober = prober_of(base, torch.float32)

    prober.test(weights, build_resident(weights, base, torch.float32))
    with pytest.raises(ValidationFailed, match="layer 1, gate_proj"):
        prober.test(weights, build_resident(turned(weights, "up_proj"), base, torch.float32))
