"""All served architectures against transformers and peft, with small random models, row by row."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights, open_weights
from graftwork.engine.runner.row_ops import rms_norm
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId
from tests.engine.engine_driver import EngineDriver
from tests.engine.families import (
    ADAPTER,
    FAMILIES,
    KINDS,
    LATER_FAMILIES,
    ONE_SLIDING_LAYER,
    WINDOW,
    Family,
    make_family,
)
from tests.engine.random_models import ALL_TARGETS
from tests.engine.runner.test_decoder_parity import RecordingRunner, random_prompt


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Returns a function that makes each family on first use."""
    torch.set_num_threads(1)
    return cache(lambda name: make_family(FAMILIES[name], tmp_path_factory.mktemp(name)))


def recorded(driver: EngineDriver) -> RecordingRunner:
    recorder = RecordingRunner(driver)
    driver.loop.steps.runner = recorder
    return recorder


def check_rows(recorder: RecordingRunner, driver: EngineDriver, family: Family, asked: dict[RequestId, Any]) -> None:
    """Compare each sampled row with the reference's logits for the same tokens."""
    for piece, logits in recorder.rows:
        prompt, adapter = asked[piece.request_id]
        tokens = [*prompt, *driver.outcomes[piece.request_id].token_ids][: piece.end]
        with torch.inference_mode():
            expected = family.references[adapter](torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*original_max_position_embeddings.*")
@pytest.mark.parametrize("max_batch_tokens", [256, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers_and_peft(
    family_of: Callable[[str], Family], name: str, max_batch_tokens: int
) -> None:
    """Base and adapter rows of one batch equal the reference in prefill, chunked prefill and decode, and with a cached
    prefix, beyond any window."""
    family = family_of(name)
    driver = family.engine(max_batch_tokens=max_batch_tokens, max_running=4)
    driver.warm(ADAPTER)
    before = len(driver.outcomes)
    recorder = recorded(driver)
    requests = [(random_prompt(Random(length), length), use) for length, use in ((19, ADAPTER), (4, None), (23, None))]

    for prompt, adapter in [*requests, requests[0]]:
        driver.submit(prompt, adapter=adapter, max_tokens=5, ignore_eos=True)
    driver.finish()
    driver.run(requests[2][0], max_tokens=2, ignore_eos=True)

    asked = dict(zip(list(driver.outcomes)[before:], [*requests, requests[0], requests[2]], strict=True))
    assert len(recorder.rows) == 4 * 5 + 2
    check_rows(recorder, driver, family, asked)
    warm = list(driver.outcomes.values())[-1].cache
    assert warm is not None
    assert warm.cached_tokens == 20


@pytest.mark.parametrize("name", LATER_FAMILIES)
def test_adapters_of_every_kind_equal_peft(tmp_path: Path, name: str) -> None:
    """In one batch, rows with each kind of adapter have peft's logits in prefill, chunks and decode: rsLoRA, DoRA, biases
    of lora_B, LoRA on embedding and head, saved embeddings and heads, and fused layers under their fused names."""
    family = make_family(FAMILIES[name], tmp_path, tuple(KINDS))
    driver = family.engine(max_batch_tokens=40, max_running=len(KINDS) + 1)
    driver.warm(*KINDS)
    recorder, asked = recorded(driver), dict[RequestId, Any]()
    uses = [None, *KINDS]

    for number, adapter in enumerate(uses):
        prompt = random_prompt(Random(number), 5 + 4 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=3, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert len(recorder.rows) == 3 * len(uses)
    check_rows(recorder, driver, family, asked)


@pytest.mark.parametrize("name", ONE_SLIDING_LAYER)
@pytest.mark.parametrize("max_batch_tokens", [256, 7], ids=["chunk", "decoding row"])
def test_a_window_ends_exactly_where_it_says(tmp_path: Path, name: str, max_batch_tokens: int) -> None:
    """In a one-layer model, changing the token `window` positions back changes no bit, and changing the next one does."""
    family = make_family(ONE_SLIDING_LAYER[name], tmp_path)
    prompt = random_prompt(Random(2), 15)

    def last_logits(changed: int | None) -> torch.Tensor:
        """The logits after the prompt, with one token changed."""
        driver = family.engine(max_batch_tokens=max_batch_tokens)
        recorder = recorded(driver)
        tokens = [token + 1 if place == changed else token for place, token in enumerate(prompt)]
        driver.run(tokens, max_tokens=1)
        ((piece, logits),) = recorder.rows
        assert len(piece.token_ids) == (1 if max_batch_tokens == 7 else 15)
        return logits

    unchanged = last_logits(None)

    assert torch.equal(last_logits(14 - WINDOW), unchanged)
    assert (last_logits(14 - WINDOW + 1) - unchanged).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["mistral-windows", "qwen2", "qwen3-windows", *LATER_FAMILIES])
def test_neighbours_do_not_change_a_bit(family_of: Callable[[str], Family], name: str) -> None:
    """A row has the same bits alone and in a batch, in prefill and decode, with biases, head norms and windows."""
    family, prompt = family_of(name), random_prompt(Random(5), 17)

    def rows(crowd: int) -> list[torch.Tensor]:
        driver = family.engine(max_running=8)
        driver.warm(ADAPTER)
        recorder = recorded(driver)
        for number in range(crowd):
            neighbour = random_prompt(Random(number), 3 + 7 * number)
            driver.submit(neighbour, adapter=[None, ADAPTER][number % 2], max_tokens=6, ignore_eos=True)
        driver.submit(prompt, adapter=ADAPTER, max_tokens=6, ignore_eos=True)
        subject = list(driver.outcomes)[-1]
        driver.finish()
        return [logits for piece, logits in recorder.rows if piece.request_id == subject]

    alone, crowded = rows(0), rows(5)

    assert len(alone) == 6
    assert all(torch.equal(one, other) for one, other in zip(alone, crowded, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "granite", "olmo2", "gemma2", "gemma3", "gemma3n", "cohere2", "glm4"])
def test_bf16_logits_are_as_near_to_the_truth_as_those_of_transformers(
    family_of: Callable[[str], Family], name: str
) -> None:
    """The largest error against fp32 arithmetic on the same bf16 weights is at most 1.5 times that of transformers."""
    family = family_of(name)
    theirs = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.bfloat16).train(False)
    oracle: torch.nn.Module = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.bfloat16).train(False)
    oracle.float()
    our_errors, their_errors = [], []

    for seed in range(8):
        tokens = random_prompt(Random(seed), 60)
        driver = family.engine(dtype="bfloat16")
        recorder = recorded(driver)
        for length in range(1, 61):
            driver.submit(tokens[:length], domain=bytes([length]), max_tokens=1)
        driver.finish()
        with torch.inference_mode():
            truth = oracle(torch.tensor([tokens])).logits[0]  # [60, vocab]
            their_errors.append((theirs(torch.tensor([tokens])).logits[0].float() - truth).abs().max().item())
        assert len(recorder.rows) == 60
        our_errors += [(logits - truth[piece.end - 1]).abs().max().item() for piece, logits in recorder.rows]

    assert 0 < max(our_errors) <= 1.5 * max(their_errors)


def of_one_row(driver: EngineDriver, prompt: list[int], adapter: str | None) -> torch.Tensor:
    """The logits after a prompt."""
    recorder = recorded(driver)
    driver.run(prompt, adapter=adapter, max_tokens=1)
    ((_, logits),) = recorder.rows
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_rounds_where_transformers_rounds(dtype: torch.dtype) -> None:
    """Norms over rows and over heads equal those of transformers to the bit."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(16, 5, 32, generator=generator)).to(dtype)
    reference = LlamaRMSNorm(32, eps=1e-5).to(dtype)
    reference.weight.data.add_(0.4 * torch.randn(32, generator=generator))
    weight = reference.weight.detach()

    assert torch.equal(rms_norm(x, weight, 1e-5), reference(x).detach())
    assert torch.equal(rms_norm(x, weight.expand(5, -1), 1e-5), reference(x).detach())


def loaded(folder: Path) -> DecoderWeights:
    config = read_model_config(folder)
    return load_decoder_weights(open_weights(folder, config), config, torch.device("cpu"), torch.float32)


def test_a_module_is_found_within_its_fused_group(family_of: Callable[[str], Family]) -> None:
    """The weight and bias of each target in a fused group equal those in the file."""
    family = family_of("llama-biased")
    tensors = load_file(family.folder / "model.safetensors")

    weights = loaded(family.folder)

    for target in ALL_TARGETS:
        part = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        weight, bias = weights.module(2, target)
        assert bias is not None
        assert torch.equal(weight, tensors[f"model.layers.2.{part}.{target}.weight"])
        assert torch.equal(bias, tensors[f"model.layers.2.{part}.{target}.bias"])
    fused = weights.layers[0].group("gate_up")
    assert (fused.weight.shape, fused.bias is not None) == ((80, 32), True)
    assert torch.equal(weights.module(-1, "lm_head")[0], tensors["lm_head.weight"])


def with_tensors(family: Family, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The family's model folder with changed tensors."""
    folder.mkdir()
    (folder / "config.json").write_bytes((family.folder / "config.json").read_bytes())
    tensors = load_file(family.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_tensor_that_no_layer_uses_is_refused(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    """A tensor without a use is refused, except rotary frequencies and names outside the model."""
    family = family_of("mistral")
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "layers.0.wq": torch.ones(8)}
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}

    loaded(with_tensors(family, tmp_path / "a", lambda tensors: tensors.update(harmless)))

    with pytest.raises(InvalidRequest, match=r"q_proj\.bias"):
        loaded(with_tensors(family, tmp_path / "b", lambda tensors: tensors.update(bias)))


@pytest.mark.parametrize(
    ("family", "name", "change", "told"),
    [
        (
            "phi3-windows",
            "self_attn.qkv_proj.weight",
            lambda tensor: tensor[1:],
            r"qkv_proj.*\(63, 32\), not \(64, 32\)",
        ),
        ("glm4", "mlp.gate_up_proj.weight", lambda tensor: tensor[:, 1:], "gate_up_proj"),
        ("olmo2", "self_attn.q_norm.weight", lambda tensor: tensor[:8], r"q_norm.*\(8,\), not \(32,\)"),
        ("gemma3", "pre_feedforward_layernorm.weight", None, "no tensor.*pre_feedforward_layernorm"),
        ("phi3-windows", "mlp.gate_up_proj.weight", None, "no tensor.*gate_proj"),
    ],
)
def test_a_missing_or_misshapen_tensor_is_refused_by_name(
    family_of: Callable[[str], Family],
    tmp_path: Path,
    family: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    told: str,
) -> None:
    """The refusal names the tensor as the file does, with the shape that it should have."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(f"model.layers.1.{name}")
        if change is not None:
            tensors[f"model.layers.1.{name}"] = change(tensor).contiguous()

    with pytest.raises(InvalidRequest, match=told):
        loaded(with_tensors(family_of(family), tmp_path / "model", damage))


def test_a_joined_tensor_is_read_in_the_order_of_its_parts(family_of: Callable[[str], Family]) -> None:
    """The rows of qkv_proj and gate_up_proj are those of q, k and v, and of gates and ups."""
    family = family_of("phi3-windows")
    tensors = load_file(family.folder / "model.safetensors")

    weights = loaded(family.folder)

    qkv, gate_up = (tensors[f"model.layers.2.{name}.weight"] for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    for whole, targets in ((qkv, ("q_proj", "k_proj", "v_proj")), (gate_up, ("gate_proj", "up_proj"))):
        assert torch.equal(torch.cat([weights.module(2, target)[0] for target in targets]), whole)
    assert weights.module(2, "k_proj")[0].shape == (16, 32)


def test_a_tied_head_may_be_in_the_file_only_as_the_embedding(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    """A head in a tied model is accepted if it equals the embedding, and refused otherwise."""
    family = family_of("llama-tied")

    def copy_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    weights = loaded(with_tensors(family, tmp_path / "a", copy_head))

    assert weights.head.weight is weights.embedding
    with pytest.raises(InvalidRequest, match="tie_word_embeddings"):
        loaded(with_tensors(family, tmp_path / "b", other_head))


def test_weights_of_a_quantised_dtype_are_refused(family_of: Callable[[str], Family], tmp_path: Path) -> None:
    """A tensor of integers is refused by name, even if config.json does not mention quantisation."""
    name = "model.layers.1.mlp.up_proj.weight"

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.int8)

    with pytest.raises(InvalidRequest, match=r"up_proj.*int8"):
        loaded(with_tensors(family_of("mistral"), tmp_path / "model", quantise))
