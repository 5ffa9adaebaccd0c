"""Architectures with experts against transformers and peft, with small random models, row by row."""

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from graftwork.engine.core.requests import AdapterUse
from graftwork.platform.ids import RequestId
from tests.engine.expert_families import EXPERT_FAMILIES, EXPERT_KINDS, EXPERTS
from tests.engine.families import Family, load_model, make_family
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Returns a function that makes each family on first use, with all its adapters."""
    torch.set_num_threads(1)

    def make(name: str) -> Family:
        kinds = EXPERT_KINDS.get(name, {})
        return make_family(EXPERT_FAMILIES[name], tmp_path_factory.mktemp(name), tuple(kinds), kinds)

    return cache(make)


@pytest.mark.parametrize("max_batch_tokens", [256, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_logits_equal_those_of_transformers(
    family_of: Callable[[str], Family], name: str, max_batch_tokens: int
) -> None:
    """Rows of the base equal transformers in prefill, chunked prefill and decode, and with a cached prefix, beyond any
    window."""
    family = family_of(name)
    driver = family.engine(max_batch_tokens=max_batch_tokens, max_running=4)
    recorder, asked = recorded(driver), dict[RequestId, Any]()
    prompts = [random_prompt(Random(length), length) for length in (19, 4, 23)]

    for prompt in prompts:
        driver.submit(prompt, max_tokens=5, ignore_eos=True)
    driver.finish()
    driver.run(prompts[2], max_tokens=2, ignore_eos=True)

    asked = {request: (prompt, None) for request, prompt in zip(driver.outcomes, [*prompts, prompts[2]], strict=True)}
    assert len(recorder.rows) == 3 * 5 + 2
    check_rows(recorder, driver, family, asked)
    warm = list(driver.outcomes.values())[-1].cache
    assert warm is not None
    assert warm.cached_tokens == 20


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", EXPERT_KINDS)
def test_adapters_of_every_kind_equal_peft(family_of: Callable[[str], Family], name: str, kernels: str) -> None:
    """In one batch, rows of each adapter have peft's logits in prefill, chunks and decode: LoRA on experts, on routers, on
    shared experts and their gates, and on all of it together."""
    family, kinds = family_of(name), EXPERT_KINDS[name]
    driver = family.engine(max_batch_tokens=20, max_running=len(kinds) + 1, lora_kernels=kernels)
    driver.warm(*kinds)
    recorder, asked = recorded(driver), dict[RequestId, Any]()
    uses = [None, *kinds]

    for number, adapter in enumerate(uses):
        prompt = random_prompt(Random(number), 5 + 4 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=3, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert len(recorder.rows) == 3 * len(uses)
    check_rows(recorder, driver, family, asked)


def test_32_rows_with_16_adapters_on_experts_equal_peft_row_by_row(tmp_path: Path) -> None:
    """Each decoding row of a batch of 32 has the logits that peft gives it alone, with its own of 16 adapters."""
    kinds = {
        f"adapter-{number}": EXPERT_KINDS["qwen3-moe"][EXPERTS] | {"r": 1 + number % 9, "lora_alpha": 4 + number}
        for number in range(16)
    }
    family = make_family(EXPERT_FAMILIES["qwen3-moe"], tmp_path, tuple(kinds), kinds)
    driver = family.engine(max_batch_tokens=256, max_running=32, device_bytes=16 * 2**20)
    driver.warm(*kinds)
    recorder, asked = recorded(driver), dict[RequestId, Any]()

    for number, adapter in enumerate([*kinds, *kinds]):
        prompt = random_prompt(Random(number), 2 + number % 5)
        driver.submit(prompt, adapter=adapter, max_tokens=4, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert len(recorder.rows) == 4 * 32
    assert driver.loop.stats().max_adapters_in_a_step == 16
    check_rows(recorder, driver, family, asked)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", EXPERT_KINDS)
def test_neighbours_do_not_change_a_bit(
    family_of: Callable[[str], Family], name: str, dtype: str, kernels: str
) -> None:
    """A row has the same bits alone and in a batch, in prefill and decode, also if others choose the same experts."""
    family, prompt = family_of(name), random_prompt(Random(5), 17)

    def rows(crowd: int) -> list[torch.Tensor]:
        driver = family.engine(max_running=8, dtype=dtype, lora_kernels=kernels)
        driver.warm(EXPERTS)
        recorder = recorded(driver)
        for number in range(crowd):
            neighbour = random_prompt(Random(number), 3 + 7 * number)
            driver.submit(neighbour, adapter=[None, EXPERTS][number % 2], max_tokens=6, ignore_eos=True)
        driver.submit(prompt, adapter=EXPERTS, max_tokens=6, ignore_eos=True)
        subject = list(driver.outcomes)[-1]
        driver.finish()
        return [logits for piece, logits in recorder.rows if piece.request_id == subject]

    alone, crowded = rows(0), rows(5)

    assert len(alone) == 6
    assert all(torch.equal(one, other) for one, other in zip(alone, crowded, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "glm4-moe", "gpt-oss"])
def test_bf16_logits_are_as_near_to_the_truth_as_those_of_transformers(
    family_of: Callable[[str], Family], name: str
) -> None:
    """The median error against fp32 arithmetic on the same bf16 weights is at most that of transformers: a token near the
    border of two experts may go to the other one in either."""
    family = family_of(name)
    theirs = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.bfloat16).train(False)
    oracle: torch.nn.Module = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.bfloat16).train(False)
    oracle.float()
    our_errors, their_errors = list[float](), list[float]()

    for seed in range(4):
        tokens = random_prompt(Random(seed), 40)
        driver = family.engine(dtype="bfloat16")
        recorder = recorded(driver)
        for length in range(1, 41):
            driver.submit(tokens[:length], domain=bytes([length]), max_tokens=1)
        driver.finish()
        with torch.inference_mode():
            truth = oracle(torch.tensor([tokens])).logits[0]  # [40, vocab]
            errors = (theirs(torch.tensor([tokens])).logits[0].float() - truth).abs().amax(dim=1)
        their_errors += errors.tolist()
        our_errors += [(logits - truth[piece.end - 1]).abs().max().item() for piece, logits in recorder.rows]

    assert 0 < torch.tensor(our_errors).median() <= 1.1 * torch.tensor(their_errors).median()


def test_drafts_do_not_change_the_answer(family_of: Callable[[str], Family]) -> None:
    """Routed layers verify draft tokens: with a prediction, the tokens are those without drafts, in fewer steps."""
    family, prompt = family_of("qwen3-moe"), random_prompt(Random(3), 9)
    plain = family.engine(max_draft_tokens=0).run(prompt, adapter=EXPERTS, max_tokens=12, ignore_eos=True)

    drafted = family.engine().run(
        prompt, adapter=EXPERTS, max_tokens=12, ignore_eos=True, prediction=tuple(plain.token_ids)
    )

    assert drafted.token_ids == plain.token_ids
    assert drafted.drafts.accepted_tokens > 0


def test_an_adapter_of_single_experts_equals_peft(tmp_path: Path) -> None:
    """What older versions of peft wrote, a pair for each projection of each expert, is served as peft converts it."""
    family = make_family(EXPERT_FAMILIES["mixtral"], tmp_path)
    folder, generator = tmp_path / "adapters" / "single", torch.Generator().manual_seed(9)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(3):
        for expert in range(4):
            for name, (out_features, in_features) in {"w1": (40, 32), "w3": (40, 32), "w2": (32, 40)}.items():
                module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                for factor, shape in (("lora_A", (4, in_features)), ("lora_B", (out_features, 4))):
                    tensors[f"{module}.{factor}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    LoraConfig(r=4, lora_alpha=6, target_modules=["w1", "w2", "w3"]).save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a pattern that peft adds itself
        model = PeftModel.from_pretrained(load_model(family.folder), folder)
    family.references["single"] = model.requires_grad_(False).train(False)
    driver = family.engine(max_batch_tokens=7, max_running=4)
    recorder, asked = recorded(driver), dict[RequestId, Any]()

    for number, adapter in enumerate(["single", None, "single"]):
        prompt = random_prompt(Random(number), 4 + 7 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=3, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    assert len(recorder.rows) == 9
    check_rows(recorder, driver, family, asked)


def test_a_mixture_of_adapters_on_experts_is_the_weighted_sum(family_of: Callable[[str], Family]) -> None:
    """A mixture with the weights 1 and 0 gives the tokens of its first adapter, and other weights give others."""
    family, prompt = family_of("qwen3-moe"), random_prompt(Random(8), 11)
    driver = family.engine()

    def logits(*uses: AdapterUse) -> torch.Tensor:
        recorder = recorded(driver)
        assert driver.run(prompt, adapters=uses, max_tokens=1, domain=repr(uses).encode()).error is None
        return recorder.rows[-1][1]

    alone = logits(AdapterUse(EXPERTS))

    torch.testing.assert_close(logits(AdapterUse(EXPERTS, 1.0), AdapterUse("router", 0.0)), alone, atol=1e-4, rtol=1e-4)
    assert (logits(AdapterUse(EXPERTS, 0.5), AdapterUse("router", 0.5)) - alone).abs().max() > 0.1
