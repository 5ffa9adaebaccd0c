"""Tests that an engine of several ranks answers as one of one rank, and as peft does."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.platform.errors import InvalidRequest
from tests.engine.adapter_kinds import KINDS, AdapterKinds, make_adapter_kinds
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import Outcome
from tests.engine.families import ADAPTER, FAMILIES, LATER_FAMILIES, Family, make_family
from tests.engine.random_models import FolderSource, make_adapter, make_base
from tests.engine.runner.test_decoder_parity import random_prompt

MIXTURE = "rank-3 and rank-24"
NUM_TOP = 20
ONE_DEVICE = ("gemma3n", "gemma3n-wide")
WHOLE_FAMILIES = ("llama-biased", "mistral-windows", "qwen2", "qwen3-windows")


@pytest.fixture(scope="module")
def adapter_kinds(tmp_path_factory: pytest.TempPathFactory) -> AdapterKinds:
    torch.set_num_threads(1)
    return make_adapter_kinds(make_base(tmp_path_factory.mktemp("ranks") / "base"))


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    torch.set_num_threads(1)
    return cache(lambda name: make_family(FAMILIES[name], tmp_path_factory.mktemp(name)))


def logprobs_by_token(outcome: Outcome) -> list[Mapping[int, float]]:
    """Returns the log probabilities of the likeliest tokens at each position of an answer."""
    return [dict(figures.top) for figures in outcome.logprobs]


def check_near_reference(model: torch.nn.Module, prompt: list[int], outcome: Outcome) -> None:
    """Compares the likeliest tokens of each position with the reference's log probabilities."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *outcome.token_ids]])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(dim=-1)
    tolerance = 1e-4 * max(1.0, logits.abs().max().item())
    for row, tops in zip(expected, logprobs_by_token(outcome), strict=True):
        assert len(tops) == NUM_TOP
        assert all(abs(row[token].item() - logprob) <= tolerance for token, logprob in tops.items())


@pytest.mark.parametrize(("num_ranks", "kernels"), [(2, "native"), (2, "torch"), (4, "native")])
def test_adapters_of_every_kind_equal_peft_on_several_ranks(
    adapter_kinds: AdapterKinds, num_ranks: int, kernels: str
) -> None:
    """In one batch of prefill and decoding, each kind of adapter has peft's logits on 2 ranks, and on 4 ranks that share
    2 KV heads; chunks too."""
    names = ["", "rank-1", "rank-12", *KINDS]
    driver = adapter_kinds.engine(
        tensor_parallel=num_ranks, lora_kernels=kernels, max_batch_tokens=40, max_running=len(names)
    )
    driver.warm(*[name or None for name in names])
    prompts = [random_prompt(Random(seed), 3 + 5 * seed) for seed, _ in enumerate(names)]

    outcomes = [
        driver.submit(prompt, adapter=name or None, max_tokens=5, ignore_eos=True, logprobs=NUM_TOP)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    driver.finish()

    for name, prompt, outcome in zip(names, prompts, outcomes, strict=True):
        check_near_reference(adapter_kinds.models[name], prompt, outcome)
    driver.loop.check_integrity()
    driver.close()


def test_tokens_of_every_kind_and_of_mixtures_are_those_of_one_rank(adapter_kinds: AdapterKinds) -> None:
    """Greedy and seeded answers are equal on one rank and on two, for every kind of adapter and for a mixture."""
    uses: dict[str, tuple[AdapterUse, ...]] = {name: (AdapterUse(name),) for name in ("rank-8", *KINDS)}
    uses |= {MIXTURE: (AdapterUse("rank-24", -0.5), AdapterUse("rank-3", 1.5)), "": ()}
    prompt = random_prompt(Random(3), 17)

    def answers(num_ranks: int) -> list[list[int]]:
        driver = adapter_kinds.engine(tensor_parallel=num_ranks, max_running=8)
        options: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
        outcomes = [driver.submit(prompt, adapters=use, **options) for use in uses.values()]
        outcomes += [driver.submit(prompt, adapters=use, temperature=0.8, seed=5, **options) for use in uses.values()]
        driver.finish()
        driver.close()
        return [outcome.token_ids for outcome in outcomes]

    alone, together = answers(1), answers(2)

    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > len(uses)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        *((name, ranks) for name in WHOLE_FAMILIES for ranks in (2, 4)),
        *((name, 2) for name in LATER_FAMILIES if name not in ONE_DEVICE),
        ("olmo2", 4),
    ],
)
def test_families_equal_transformers_on_several_ranks(
    family_of: Callable[[str], Family], name: str, num_ranks: int
) -> None:
    """Base and adapter rows have the reference's logits with biases, norms of heads and of whole queries, windows, tied heads,
    and with all that other families have."""
    family = family_of(name)
    driver = family.engine(tensor_parallel=num_ranks, max_batch_tokens=20, max_running=4)
    requests = [(random_prompt(Random(length), length), use) for length, use in ((19, ADAPTER), (4, None), (23, None))]

    outcomes = [
        driver.submit(prompt, adapter=adapter, max_tokens=6, ignore_eos=True, logprobs=NUM_TOP)
        for prompt, adapter in requests
    ]
    driver.finish()
    driver.close()

    for (prompt, adapter), outcome in zip(requests, outcomes, strict=True):
        check_near_reference(family.references[adapter], prompt, outcome)


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_several_streams_are_refused_by_name(family_of: Callable[[str], Family], name: str) -> None:
    """A model with several residual streams is served by one device, and the error says so."""
    with pytest.raises(InvalidRequest, match=r"--tensor-parallel: .*residual streams"):
        family_of(name).engine(tensor_parallel=2)


def test_a_rank_reads_and_holds_only_its_part(models: RandomModels) -> None:
    """With four ranks, rank 0 holds a quarter of the bytes of all projections, and a KV page half of a whole one: there
    are only two KV heads."""
    whole, part = models.engine(), models.engine(tensor_parallel=4)

    engines = [whole.engine, part.engine]

    assert engines[0].cache.page_shape[3:] == (2, 8)
    assert engines[1].cache.page_shape[3:] == (1, 8)
    assert engines[0].memory.weights_bytes - engines[1].memory.weights_bytes > 4 * 2 * (3 * 56 + 2 * 32) * 32 * 3 // 4
    part.close()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "dtype"), [(8, "float32"), (2, "bfloat16"), (8, "bfloat16")])
def test_up_to_eight_ranks_answer_as_one_in_either_dtype(tmp_path: Path, num_ranks: int, dtype: str) -> None:
    """Eight ranks share two KV heads. In fp32 they give the tokens of one rank, for the base and an adapter; in bf16 the
    log probabilities of the first token are as near to one rank's as rounding to bf16 brings one rank's to those in fp32.
    """
    base = make_base(tmp_path / "base", num_heads=8)
    adapter = make_adapter(base, tmp_path / "adapter", seed=3, r=8, lora_alpha=16)
    models = RandomModels(base, FolderSource({"sha256:eight": adapter}, {"sha256:eight": 2.0}), {})
    prompt = random_prompt(Random(8), 21)

    def answers(**options: Any) -> list[Outcome]:
        driver = models.engine(**options)
        outcomes = [
            driver.run(prompt, adapter=digest, max_tokens=6, ignore_eos=True, logprobs=NUM_TOP)
            for digest in (None, "sha256:eight")
        ]
        driver.close()
        return outcomes

    def distance(these: list[Outcome], those: list[Outcome]) -> float:
        firsts = [
            (logprobs_by_token(one)[0], logprobs_by_token(other)[0]) for one, other in zip(these, those, strict=True)
        ]
        apart = [abs(one[token] - other[token]) for one, other in firsts for token in one.keys() & other.keys()]
        assert len(apart) > NUM_TOP
        return max(apart)

    exact, one = answers(), answers(dtype=dtype)

    several = answers(dtype=dtype, tensor_parallel=num_ranks)

    if dtype == "float32":
        assert [outcome.token_ids for outcome in several] == [outcome.token_ids for outcome in one]
    assert distance(several, one) <= max(2 * distance(one, exact), 1e-3)


@pytest.mark.parametrize("drafts", [0, 16])
def test_overlapped_steps_answer_the_same_on_two_ranks(adapter_kinds: AdapterKinds, drafts: int) -> None:
    """Steps that take their tokens from the step before, on the device, give the tokens of one rank without overlap."""
    prompts = [random_prompt(Random(seed), 3 + 4 * seed) for seed in range(5)]

    def answers(**options: Any) -> list[list[int]]:
        driver = adapter_kinds.engine(max_running=4, max_draft_tokens=drafts, **options)
        driver.warm("rank-8")
        outcomes = [
            driver.submit(prompt, adapter=("rank-8", None)[index % 2], max_tokens=9, ignore_eos=True)
            for index, prompt in enumerate(prompts)
        ]
        driver.finish()
        driver.close()
        return [outcome.token_ids for outcome in outcomes]

    assert answers(tensor_parallel=2, overlap_steps=True) == answers()


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [(3, "4 attention heads"), (8, "4 attention heads"), (0, "0 is not served"), (9, "give 1 to 8")],
)
def test_a_model_that_cannot_be_divided_is_refused(models: RandomModels, num_ranks: int, words: str) -> None:
    """The refusal names what cannot be divided, and the numbers that fit."""
    with pytest.raises(InvalidRequest, match=words) as refusal:
        models.engine(tensor_parallel=num_ranks)

    assert refusal.value.param == "tensor_parallel"
    assert num_ranks not in (3, 8) or "Give one of 1, 2, 4." in str(refusal.value)


def test_a_worker_that_refuses_ends_the_start_with_its_words(models: RandomModels, tmp_path: Path) -> None:
    """A worker whose KV folder cannot be used names it, and the engine is not built."""
    (tmp_path / "rank-1-of-2").write_text("no folder")

    with pytest.raises(InvalidRequest, match="rank-1-of-2"):
        models.engine(tensor_parallel=2, disk_kv_bytes=2**22, kv_folder=tmp_path)
