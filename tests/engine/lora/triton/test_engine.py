"""Tests of the whole engine with interpreted kernels, against the same engine with torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.engine.messages import ForgetAdapter
from tests.engine.lora.test_lifecycle import CountingAdapterSource
from tests.engine.lora.triton.engine_runs import VOCAB, Request, Run, engine_of, pair, run, weights
from tests.engine.random_models import make_base

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets"),
]

NARROW = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_base(tmp_path_factory.mktemp("kernels") / "base", num_layers=1)


def both(
    base: Path, adapters: Mapping[str, AdapterWeights], requests: Sequence[Request], **options: int
) -> tuple[Run, Run]:
    """What the kernels and what torch make of the same requests."""
    torch_run, kernel_run = (
        run(engine_of(base, CountingAdapterSource(adapters), lora_kernels=kernels, **options), list(adapters), requests)
        for kernels in ("torch", "triton")
    )
    return kernel_run, torch_run


def assert_alike(kernels: Run, plain: Run) -> None:
    """The same tokens, and logits within rounding."""
    assert kernels.token_ids == plain.token_ids
    torch.testing.assert_close(kernels.logits, plain.logits, atol=1e-4, rtol=1e-4)


def test_a_mixed_batch_is_torchs(base: Path) -> None:
    """A batch of base rows and adapters of several ranks has the logits and tokens of torch."""
    adapters = {
        "wide": weights("wide", 16, 1),
        "narrow": weights("narrow", 3, 2, NARROW, scale=5 / 3),
        "plain": weights("plain", 8, 3, ("k_proj", "gate_proj", "o_proj")),
    }
    requests = [
        Request(4),
        Request(50, (AdapterUse("wide"),)),
        Request(3, (AdapterUse("narrow"),)),
        Request(2, (AdapterUse("plain"),)),
        Request(1),
    ]

    kernels, plain = both(base, adapters, requests, max_batch_tokens=56)

    assert_alike(kernels, plain)
    assert kernels.max_adapters_in_a_step == 3
    alone = run(
        engine_of(base, CountingAdapterSource({}), lora_kernels="torch"),
        [],
        [replace(one, uses=()) for one in requests],
    )
    assert not torch.allclose(alone.logits[1], plain.logits[1], atol=1e-2)  # the adapters do something


def test_a_mixture_is_torchs(base: Path) -> None:
    """A mixture of two adapters, beside one of them and a base row, has the logits of torch."""
    adapters = {"a": weights("a", 8, 1, NARROW), "b": weights("b", 3, 2, ("q_proj", "o_proj"), scale=0.6)}
    mixture = (AdapterUse("a", 0.5), AdapterUse("b", -1.25))

    kernels, plain = both(base, adapters, [Request(2, mixture), Request(1, (AdapterUse("b"),)), Request(2)])

    assert_alike(kernels, plain)


def test_every_kind_of_adapter_is_torchs(base: Path) -> None:
    """DoRA, biases, saved matrices and a rank above the tables' limit have the logits of torch in one batch."""
    few = ("k_proj", "down_proj")
    generator = torch.Generator().manual_seed(4)
    plain_pairs = weights("", 4, 5, few).pairs
    dora = {key: replace(found, magnitude=1 + found.B[:, 0].abs()) for key, found in plain_pairs.items()}
    biased = {key: replace(found, bias=found.B[:, 0].clone()) for key, found in plain_pairs.items()}
    saved_head, saved_embedding = torch.randn(2, VOCAB, 32, generator=generator)
    adapters = {
        "dora": AdapterWeights("dora", dora),
        "bias": AdapterWeights("bias", biased, biases={(0, "q_proj"): torch.linspace(-1, 1, 32)}),
        "embedding": AdapterWeights("embedding", plain_pairs, embedding=pair(32, VOCAB, 4, 6)),
        "head": AdapterWeights("head", {}, head=pair(VOCAB, 32, 4, 7)),
        "saved": AdapterWeights("saved", {}, saved_head=saved_head, saved_embedding=saved_embedding),
        "high": weights("high", 40, 8, few),
    }
    requests = [Request(1, (AdapterUse(name),)) for name in adapters]

    kernels, plain = both(base, adapters, requests, max_lora_rank=32)

    assert_alike(kernels, plain)


def test_an_adapter_that_gave_way_and_came_back_is_applied_anew(base: Path) -> None:
    """An adapter that was evicted and placed again makes the same tokens as before."""
    adapters = {name: weights(name, 8, seed, ("down_proj",)) for seed, name in enumerate("ab")}
    room = engine_of(base, CountingAdapterSource(adapters), lora_kernels="torch")
    room.run([3], adapter="a", max_tokens=1)
    num_bytes = room.loop.stats().lora_pool_bytes
    plain = engine_of(base, CountingAdapterSource(adapters), lora_kernels="torch")
    driver = engine_of(base, CountingAdapterSource(adapters), lora_kernels="triton", lora_pool_bytes=num_bytes)

    for turn, name in enumerate("abab"):
        options = {"adapter": name, "max_tokens": 2, "ignore_eos": True, "domain": bytes([turn])}
        assert driver.run([5, 6], **options).token_ids == plain.run([5, 6], **options).token_ids
        assert driver.loop.stats().resident_adapters == (name,)


def test_adapters_that_were_slid_elsewhere_are_read_where_they_are(base: Path) -> None:
    """Adapters that were moved for a large one are read at their new addresses."""
    adapters = {name: weights(name, 40, seed, ("down_proj",)) for seed, name in enumerate("abcdef")}
    adapters["g"] = weights("g", 128, 9, ("down_proj",))
    frame_bytes = 2 * 16 * 16 * 4  # keys and values of one layer, 16 tokens of width 16 in fp32
    small = {"page_tokens": 16, "kv_reserve_share": 0.0, "device_bytes": 60 * frame_bytes}
    driver = engine_of(base, CountingAdapterSource(adapters), lora_kernels="triton", **small)
    plain = engine_of(base, CountingAdapterSource(adapters), lora_kernels="torch")
    driver.warm(*"abcdef")
    for name in "bde":
        driver.loop.take(ForgetAdapter(name))

    told = {name: driver.run([5, 6], adapter=name, max_tokens=2, ignore_eos=True).token_ids for name in "gacf"}

    assert driver.engine.frame_allocator.num_moved_runs == 2
    assert told == {name: plain.run([5, 6], adapter=name, max_tokens=2, ignore_eos=True).token_ids for name in "gacf"}
    driver.loop.check_integrity()
