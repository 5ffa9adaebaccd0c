"""Tests of rows of every kind of adapter in one batch, against peft."""

from random import Random

import pytest
import torch

from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.lora.weights import AdapterWeights, LoraPair
from graftwork.platform.errors import InvalidRequest
from tests.engine.adapter_kinds import KINDS, RANKS, AdapterKinds, make_adapter_kinds
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.random_models import make_base
from tests.engine.runner.test_decoder_parity import RecordingRunner, random_prompt

RANKED = [f"rank-{rank}" for rank in RANKS]


@pytest.fixture(scope="module")
def adapter_kinds(tmp_path_factory: pytest.TempPathFactory) -> AdapterKinds:
    torch.set_num_threads(1)
    return make_adapter_kinds(make_base(tmp_path_factory.mktemp("grafts") / "base"))


class RecordedEngine:
    """An engine that records the logits of each request."""

    def __init__(self, driver: EngineDriver, adapters: list[str]) -> None:
        self.driver = driver
        driver.warm(*[name or None for name in adapters])
        self.recorder = RecordingRunner(driver)
        driver.loop.steps.runner = self.recorder

    def logits(self, outcome: Outcome) -> torch.Tensor:
        """Of every token that the request made.  # [made, vocab]"""
        request_id = next(key for key, value in self.driver.outcomes.items() if value is outcome)
        return torch.stack([row for piece, row in self.recorder.rows if piece.request_id == request_id])


def expected_logits(model: torch.nn.Module, prompt: list[int], made: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *made]])).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.parametrize(("kernels", "max_batch_tokens"), [("native", 512), ("native", 11), ("torch", 512)])
@pytest.mark.parametrize("names", [RANKED, list(KINDS)], ids=["ranks", "kinds"])
def test_rows_of_every_rank_and_kind_equal_peft_in_one_batch(
    adapter_kinds: AdapterKinds, names: list[str], kernels: str, max_batch_tokens: int
) -> None:
    """In one batch of prefill and decoding, each row has its own adapter's logits by peft."""
    random = Random(5)
    names = ["", *names, names[0], ""]
    options = {"lora_kernels": kernels, "max_batch_tokens": max_batch_tokens, "max_running": 11}
    engine = RecordedEngine(adapter_kinds.engine(**options), names)
    prompts = [random_prompt(random, random.choice((1, 3, 7, 18, 25))) for _ in names]

    outcomes = [
        engine.driver.submit(prompt, adapter=name or None, max_tokens=5, ignore_eos=True)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    engine.driver.finish()

    for name, prompt, outcome in zip(names, prompts, outcomes, strict=True):
        expected = expected_logits(adapter_kinds.models[name], prompt, outcome.token_ids)
        assert (engine.logits(outcome) - expected).abs().max() <= 1e-4 * max(1.0, expected.abs().max().item()), name
    assert engine.driver.loop.stats().max_adapters_in_a_step >= (8 if max_batch_tokens > 100 else 4)


NEIGHBOURLY = [
    *(
        ("native", dtype, subject)
        for dtype in ("float32", "bfloat16")
        for subject in ("", "rank-3", "rank-128", "dora", "head")
    ),
    ("torch", "float32", "rank-3"),
    ("torch", "bfloat16", "head"),
]


@pytest.mark.parametrize(("kernels", "dtype", "subject"), NEIGHBOURLY)
def test_neighbours_do_not_change_a_bit(adapter_kinds: AdapterKinds, kernels: str, dtype: str, subject: str) -> None:
    """A row has the same bits alone and in any batch, at any place in it."""
    random = Random(9)
    prompt = random_prompt(random, 21)
    strangers = ["rank-3", "", "rank-64", "dora-some", "rank-8", "rank-24", "embedding", "rank-16"]
    companies: list[list[tuple[str, int]]] = [
        [],
        [(subject, 1)] * 9,
        [(name, 3) for name in strangers],
        [(name, 30) for name in reversed(strangers)],
        [("rank-128", 2), ("rank-1", 50), (subject, 33), ("", 17)],
    ]
    seen = []
    for number, company in enumerate(companies):
        fresh = adapter_kinds.engine(dtype=dtype, lora_kernels=kernels, max_running=16)
        engine = RecordedEngine(fresh, [subject, *[name for name, _ in company]])
        requests = [(name, random_prompt(random, length)) for name, length in company]
        requests.insert(number % (len(requests) + 1), (subject, prompt))
        outcomes = [
            engine.driver.submit(text, adapter=name or None, max_tokens=6, ignore_eos=True) for name, text in requests
        ]
        engine.driver.finish()
        seen.append(engine.logits(outcomes[number % len(requests)]))

    for number, logits in enumerate(seen):
        assert torch.equal(logits, seen[0]), f"company {number} changed it"


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_adapter_that_overflows_hurts_no_other_row(adapter_kinds: AdapterKinds, kernels: str) -> None:
    """An adapter that overflows makes NaN in its own rows only."""
    huge = LoraPair(torch.full((4, 32), 1e30), torch.full((32, 4), 1e30), 1.0)
    adapter_kinds = AdapterKinds(
        adapter_kinds.base,
        adapter_kinds.models,
        {**adapter_kinds.weights, "wild": AdapterWeights("wild", {(0, "q_proj"): huge})},
    )
    prompt = random_prompt(Random(2), 6)
    alone = RecordedEngine(adapter_kinds.engine(lora_kernels=kernels), ["rank-8"])
    quiet = alone.driver.submit(prompt, adapter="rank-8", ignore_eos=True)
    alone.driver.finish()

    beside = RecordedEngine(adapter_kinds.engine(lora_kernels=kernels), ["rank-8", "wild"])
    outcome = beside.driver.submit(prompt, adapter="rank-8", ignore_eos=True)
    wild = beside.driver.submit(prompt, adapter="wild", ignore_eos=True)
    beside.driver.finish()

    assert torch.equal(beside.logits(outcome), alone.logits(quiet))
    assert beside.logits(wild).isnan().any()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_bfloat16_is_as_near_to_the_fp32_oracle_as_its_rounding(adapter_kinds: AdapterKinds, kernels: str) -> None:
    """In bf16 each kind of adapter is at most twice as far from the fp32 reference as peft's bf16."""
    names = [*RANKED, *KINDS]
    engine = RecordedEngine(adapter_kinds.engine(dtype="bfloat16", lora_kernels=kernels, max_running=32), names)
    prompts = [random_prompt(Random(number), 12) for number in range(len(names))]
    outcomes = [
        engine.driver.submit(prompt, adapter=name, max_tokens=3, ignore_eos=True)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    engine.driver.finish()

    ours, theirs = [], []
    for name, prompt, outcome in zip(names, prompts, outcomes, strict=True):
        oracle = expected_logits(adapter_kinds.models[name], prompt, outcome.token_ids)
        ours.append((engine.logits(outcome) - oracle).square().mean())
        rounded = expected_logits(adapter_kinds.models[name].to(torch.bfloat16), prompt, outcome.token_ids).float()
        adapter_kinds.models[name].to(torch.float32)
        theirs.append((rounded - oracle).square().mean())
    assert torch.stack(ours).mean().sqrt() <= 2 * torch.stack(theirs).mean().sqrt()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_mixture_is_the_weighted_sum_of_its_adapters(adapter_kinds: AdapterKinds, kernels: str) -> None:
    """A mixture equals peft's add_weighted_adapter by concatenation, in any order of its parts."""
    parts = {"rank-3": 0.7, "rank-16": -0.4, "rank-8": 1.5}
    driver = adapter_kinds.engine(lora_kernels=kernels)
    engine = RecordedEngine(driver, ["", *parts])
    prompt = random_prompt(Random(1), 19)
    uses = tuple(AdapterUse(name, weight) for name, weight in parts.items())
    mixed = driver.submit(prompt, adapters=uses, max_tokens=5, ignore_eos=True)
    driver.submit(prompt, max_tokens=5, ignore_eos=True)
    turned = driver.submit(prompt, adapters=uses[::-1], max_tokens=5, ignore_eos=True, domain=b"other")
    driver.submit(prompt, adapter="rank-16", max_tokens=5, ignore_eos=True)
    driver.finish()

    base = adapter_kinds.models[""]
    expected = mixture_logits(adapter_kinds, parts, prompt, mixed.token_ids)
    torch.testing.assert_close(engine.logits(mixed), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(engine.logits(turned), engine.logits(mixed))
    assert not torch.allclose(expected, expected_logits(base, prompt, mixed.token_ids), atol=1e-2)


def mixture_logits(
    adapter_kinds: AdapterKinds, parts: dict[str, float], prompt: list[int], made: list[int]
) -> torch.Tensor:
    """Returns the logits of the base with every delta added to its matrices."""
    from transformers import LlamaForCausalLM

    merged = LlamaForCausalLM.from_pretrained(adapter_kinds.base, dtype=torch.float32).requires_grad_(False)
    for name, weight in parts.items():
        for (layer, target), pair in adapter_kinds.weights[name].pairs.items():
            parent = merged.model.layers[layer]
            module = getattr(parent.self_attn if hasattr(parent.self_attn, target) else parent.mlp, target)
            module.weight += weight * pair.scale * (pair.B @ pair.A)
    return expected_logits(merged, prompt, made)


@pytest.mark.parametrize(
    ("uses", "word"),
    [
        ((AdapterUse("dora", 0.5), AdapterUse("rank-8", 0.5)), "dora"),
        ((AdapterUse("saved", 0.5),), "saved"),
        ((AdapterUse("lora-bias", 1.5),), "lora-bias"),
        (tuple(AdapterUse(name) for name in RANKED[:5]), "at most 4"),
        ((AdapterUse("rank-8"), AdapterUse("rank-8")), "named once"),
        ((AdapterUse("rank-8", float("nan")),), "number"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(
    adapter_kinds: AdapterKinds, uses: tuple[AdapterUse, ...], word: str
) -> None:
    """A mixture that cannot be served is refused with the reason, and other requests continue."""
    driver = adapter_kinds.engine()
    outcome = driver.run([5, 6, 7], adapters=uses)

    assert isinstance(outcome.error, InvalidRequest)
    assert word in outcome.error.message
    assert driver.run([5, 6, 7], adapter="rank-8").finish is not None
    driver.loop.check_integrity()


def test_the_rows_of_each_path_are_counted(adapter_kinds: AdapterKinds) -> None:
    """The engine reports 7 tokens of a prompt under torch and two that decode under the kernel, none of the base."""
    driver = adapter_kinds.engine(lora_kernels="native", max_draft_tokens=0)
    driver.warm(RANKED[0], None)
    before = driver.loop.stats()

    driver.submit(random_prompt(Random(8), 7), adapter=RANKED[0], max_tokens=3, ignore_eos=True)
    driver.submit(random_prompt(Random(9), 5), max_tokens=3, ignore_eos=True)
    driver.finish()

    after = driver.loop.stats()
    assert after.lora_torch_rows - before.lora_torch_rows == 7
    assert after.lora_kernel_rows - before.lora_kernel_rows == 2
