"""Tests of the whole engine on a GPU: the kernels against torch on the GPU and against fp32 on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.lora.weights import AdapterWeights

pytest.importorskip("peft", reason="peft and transformers, which make the models of these tests, are not installed")
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import VOCAB, Request, Run, engine_of, pair, run, weights
from tests.engine.random_models import make_base

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FEW = ("q_proj", "v_proj", "down_proj")
MIXTURE = (AdapterUse("narrow", 0.5), AdapterUse("wide", -1.25))
REQUESTS = (
    Request(40),
    Request(70, (AdapterUse("wide"),)),
    Request(9, (AdapterUse("narrow"),)),
    Request(3, (AdapterUse("head"),)),
    Request(12, MIXTURE),
    Request(5, (AdapterUse("dora"),)),
    Request(1, (AdapterUse("narrow"),)),
)
"""Between them: base rows, prompts in chunks, tiles and single rows, a mixture, columns, and the vocabulary."""

Serve = Callable[..., Run]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Runs the requests on a fresh engine over one base and its adapters."""
    pytest.importorskip("triton", reason="the kernels extra is not installed")
    base: Path = make_base(tmp_path_factory.mktemp("device") / "base")
    few = weights("dora", 6, 3, FEW, num_layers=2)
    dora = {key: replace(found, magnitude=1 + found.B[:, 0].abs()) for key, found in few.pairs.items()}
    adapters = {
        "wide": weights("wide", 64, 1, num_layers=2, scale=0.3),
        "narrow": weights("narrow", 3, 2, FEW, num_layers=2, scale=5 / 3),
        "dora": AdapterWeights("dora", dora),
        "head": AdapterWeights("head", {}, head=pair(VOCAB, 32, 4, 7), embedding=pair(32, VOCAB, 4, 6)),
    }

    def served(max_tokens: int, **options: str | int) -> Run:
        driver = engine_of(base, CountingAdapterSource(adapters), max_batch_tokens=48, **options)
        return run(driver, list(adapters), REQUESTS, max_tokens)

    return served


def test_in_full_precision_the_kernels_make_the_tokens_of_the_cpu(serve: Serve) -> None:
    """In fp32 the kernels give the greedy tokens of the CPU, and logits within rounding."""
    expected = serve(6, device="cpu", lora_kernels="torch")

    actual = serve(6, device="cuda", lora_kernels="triton")

    assert actual.token_ids == expected.token_ids
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_with_kv_in_bytes_the_kernels_make_the_logits_of_the_cpu(serve: Serve, kv_dtype: str) -> None:
    """In fp32 with KV in bytes, the first logits of each request are those of the CPU's torch: but for values that a rounding
    leads to another code, within a step of codes."""
    if kv_dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device does not convert e4m3")
    expected = serve(1, device="cpu", lora_kernels="torch", kv_dtype=kv_dtype)

    actual = serve(1, device="cuda", kernels="triton", kv_dtype=kv_dtype)

    torch.testing.assert_close(actual.logits, expected.logits, atol=3e-2, rtol=3e-2)
    assert (actual.logits - expected.logits).square().mean().sqrt() < 1e-3


def test_in_bfloat16_the_kernels_are_as_near_to_the_oracle_as_torch(serve: Serve) -> None:
    """In bf16 the kernels' logits are at most 1.5 times as far from fp32 as torch's bf16 path."""
    oracle = serve(1, device="cpu", lora_kernels="torch").logits
    plain = serve(1, device="cuda", dtype="bfloat16", lora_kernels="torch").logits

    kernels = serve(1, device="cuda", dtype="bfloat16", lora_kernels="triton").logits

    def error(logits: torch.Tensor) -> float:
        return (logits - oracle).square().mean().sqrt().item()

    assert error(kernels) <= 1.5 * error(plain)


def test_a_device_is_served_by_the_kernels_unless_told_otherwise(serve: Serve) -> None:
    """With lora_kernels auto, logits have the bits of triton's."""
    named = serve(2, device="cuda", dtype="bfloat16", lora_kernels="triton")

    chosen = serve(2, device="cuda", dtype="bfloat16")

    assert torch.equal(chosen.logits, named.logits)
