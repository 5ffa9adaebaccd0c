"""All served architectures against transformers and peft, with small random models, row by row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.weight_reader import WeightReader
from graftwork.engine.model.weights import DecoderWeights, load_decoder_weights
from graftwork.engine.runner.row_ops import rms_norm
from graftwork.platform.errors import InvalidRequest
from graftwork.platform.ids import RequestId
from tests.engine.engine_driver import EngineDriver
from tests.engine.parallel.rank_threads import start_thread
from tests.engine.random_models import ALL_TARGETS, FolderSource
from tests.engine.runner.test_decoder_parity import RecordingRunner, random_prompt

ADAPTER = "sha256:graft"
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def llama(rope_type: str = "default", scaling: dict[str, Any] | None = None, **options: Any) -> PreTrainedConfig:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **(scaling or {})}
    return LlamaConfig(**SIZES, rope_parameters=rope, **options)


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-biased": llama(attention_bias=True, mlp_bias=True, head_dim=12),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-linear": llama("linear", {"factor": 2.0}),
    "llama-dynamic": llama("dynamic", {"factor": 2.0}),
    "llama-llama3": llama("llama3", LLAMA3),
    "llama-yarn": llama("yarn", YARN),
    "llama-yarn-attention-factor": llama("yarn", YARN | {"attention_factor": 0.6}),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "mistral-windows": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "qwen3-windows": Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
}
ONE_LAYER = SIZES | {"num_hidden_layers": 1, "sliding_window": WINDOW}
ONE_SLIDING_LAYER: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**ONE_LAYER),
    "qwen2": Qwen2Config(**ONE_LAYER, use_sliding_window=True, max_window_layers=0),
    "qwen3": Qwen3Config(**ONE_LAYER, use_sliding_window=True, layer_types=["sliding_attention"]),
}


@dataclass(frozen=True)
class Family:
    """One model, an adapter for it, and the reference of each."""

    folder: Path
    adapter: Path
    references: dict[str | None, torch.nn.Module]

    def engine(self, **options: Any) -> EngineDriver:
        settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 2 * 2**20} | options
        source = FolderSource({ADAPTER: self.adapter}, {ADAPTER: 2.0})
        return EngineDriver(
            build_engine(EngineConfig(model=self.folder, **settings), lambda _: source, start_worker=start_thread)
        )


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Set norms and biases to random values; transformers initialises them with ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))


def make_family(config: PreTrainedConfig, root: Path) -> Family:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomise(base, torch.Generator().manual_seed(1))
    base.save_pretrained(root / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=ALL_TARGETS))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(str(root / "adapter"))
    plain = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    grafted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32), root / "adapter"
    )
    references = {name: model.requires_grad_(False).train(False) for name, model in ((None, plain), (ADAPTER, grafted))}
    return Family(root / "base", root / "adapter", references)


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


@pytest.mark.parametrize("name", ["mistral-windows", "qwen2", "qwen3-windows"])
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


def test_bf16_logits_are_as_near_to_the_truth_as_those_of_transformers(family_of: Callable[[str], Family]) -> None:
    """The largest error against fp32 arithmetic on the same bf16 weights is at most 1.5 times that of transformers."""
    family = family_of("qwen3")
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
    return load_decoder_weights(WeightReader(folder), read_model_config(folder), torch.device("cpu"), torch.float32)


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
