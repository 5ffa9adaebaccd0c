"""Requests with attention sinks and a rolling window, against StreamingLLM over transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graftwork.engine.build.limits import scheduler_limits
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import ServiceTier, SessionKey, SessionUse
from graftwork.engine.core.sampling import RollingWindow
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.rotary import RotaryTable, RotaryTurn
from graftwork.platform.errors import InvalidRequest
from tests.engine.attention.streaming_llama import StreamingLlama
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.expert_families import EXPERT_FAMILIES
from tests.engine.families import FAMILIES, make_family
from tests.engine.hybrid_families import HYBRID_FAMILIES
from tests.engine.speculative.test_equal_tokens import open_engine

PROMPT = [2 + (place * 37) % 90 for place in range(43)]
Make = Callable[..., EngineDriver]


def streamed(model: torch.nn.Module, prompt: list[int], sinks: int, window: int, count: int) -> list[int]:
    """The greedy answer of the reference."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(StreamingLlama(model, sinks, window).logits(text)[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(("sinks", "window"), [(4, 8), (0, 5), (1, 1), (4, 30), (9, 3), (60, 8), (3, 200)])
@pytest.mark.parametrize("max_batch", [64, 7])
def test_log_probabilities_are_those_of_streaming_llm(
    models: RandomModels, make_engine: Make, sinks: int, window: int, max_batch: int
) -> None:
    """Of a prompt in one chunk or in many, and of the tokens that follow, past sinks and window and within them."""
    driver = make_engine(max_batch_tokens=max_batch, kernels="torch", max_draft_tokens=0)
    found = driver.run(
        PROMPT,
        max_tokens=9,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=0,
        attention_sinks=sinks,
        attention_window=window,
    )

    text = [*PROMPT, *found.token_ids]
    expected = StreamingLlama(models.references[None], sinks, window).logits(text).log_softmax(-1)
    own = torch.tensor([one.logprob for one in (*found.prompt_logprobs, *found.logprobs)])
    theirs = expected[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert torch.allclose(own, theirs, atol=2e-4)
    assert found.token_ids == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_without_anything_to_forget_the_answer_is_the_exact_one(make_engine: Make) -> None:
    """A window that reaches over the whole text changes no token, and a short one does."""
    driver = make_engine(kernels="torch")
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    exact = driver.run(PROMPT, **options)

    wide = driver.run(PROMPT, attention_window=100, **options)
    narrow = driver.run(PROMPT, attention_window=6, **options)

    assert wide.token_ids == exact.token_ids
    assert narrow.token_ids != exact.token_ids


def test_pages_are_never_shared_with_exact_requests_or_with_other_windows(
    models: RandomModels, make_engine: Make
) -> None:
    """A prompt is found again by requests with the same window alone, whichever came first, also when it is public."""
    driver = make_engine(kernels="torch")
    kinds: list[dict[str, Any]] = [
        {},
        {"attention_window": 8},
        {"attention_window": 8, "attention_sinks": 5},
        {"attention_window": 9},
    ]
    reference = models.references[None]
    for _ in range(2):
        for kind in kinds:
            found = driver.run(PROMPT, max_tokens=5, ignore_eos=True, public_tokens=40, **kind)
            sinks = kind.get("attention_sinks", 4)
            expected = streamed(reference, PROMPT, sinks, kind.get("attention_window", 999), 5)
            assert found.token_ids == expected, kind
    first, again = (
        [driver.run([*PROMPT[::-1], turn], max_tokens=1, **kind).cache for kind in kinds] for turn in (3, 4)
    )
    assert [one.device_tokens for one in first if one is not None] == [0, 0, 0, 0]
    assert all(one is not None and one.device_tokens == 40 for one in again)


def test_neighbours_drafts_and_preemption_change_no_token(models: RandomModels) -> None:
    """Requests with windows, without, with adapters and with drafts in the same steps have the answers of the reference."""
    random = Random(3)
    sizes: dict[str, Any] = {"max_batch_tokens": 24, "max_running": 3, "host_kv_bytes": 2**21, "kernels": "torch"}
    driver = open_engine(models, 5, draft_model=models.base, **sizes)
    jobs: list[dict[str, Any]] = []
    for number in range(10):
        prompt = [random.randrange(2, 97) for _ in range(random.randint(4, 40))]
        window = {"attention_sinks": number % 5, "attention_window": 3 + number} if number % 3 else {}
        jobs.append({"prompt": prompt * 2, "adapter": "sha256:wide" if number % 2 else None, **window})

    outcomes = []
    for number, job in enumerate(jobs):
        tier = ServiceTier.PRIORITY if number % 4 == 3 else ServiceTier.DEFAULT
        outcomes.append(driver.submit(**job, max_tokens=12, ignore_eos=True, domain=b"%d" % number, tier=tier))
        driver.step()
        driver.step()
    driver.finish()

    for job, found in zip(jobs, outcomes, strict=True):
        sinks, window = job.get("attention_sinks", 0), job.get("attention_window", 999)
        text = [*job["prompt"], *found.token_ids]
        logits = StreamingLlama(models.references[job["adapter"]], sinks, window).logits(text)
        assert found.token_ids == logits[len(job["prompt"]) - 1 : -1].argmax(-1).tolist()
    stats = driver.loop.stats()
    assert stats.model_accepted_drafts > 5
    assert stats.model_rejected_drafts > 5
    assert stats.preemptions > 0


def test_a_plain_prompt_beside_a_decoding_window_is_computed_exactly(models: RandomModels, make_engine: Make) -> None:
    """A step of one decoding row with a window and one chunk of another prompt: both answers are the reference's."""
    driver = make_engine(kernels="torch", max_draft_tokens=0)
    rolling = driver.submit(PROMPT, max_tokens=9, ignore_eos=True, attention_window=5)
    driver.step()
    driver.step()

    plain = driver.run(PROMPT[::-1], max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    driver.finish()

    text = [*PROMPT[::-1], *plain.token_ids]
    chances = models.references[None](torch.tensor([text])).logits[0].log_softmax(-1)
    own = torch.tensor([one.logprob for one in plain.prompt_logprobs])
    assert torch.allclose(own, chances[:42].gather(1, torch.tensor(text[1:43])[:, None])[:, 0], atol=2e-4)
    assert rolling.token_ids == streamed(models.references[None], PROMPT, 4, 5, 9)


def test_a_session_with_a_window_keeps_its_pages(models: RandomModels, make_engine: Make) -> None:
    """Turns find the pages of earlier turns, session commands find them with the window and not without, suspended pages come
    back with the answer of the reference, and closing frees all."""
    driver = make_engine(kernels="torch", host_kv_bytes=2**21)
    use, window = SessionKey("talk"), RollingWindow(2, 9)
    options: dict[str, Any] = {"attention_window": 9, "attention_sinks": 2, "ignore_eos": True}
    first = driver.run(PROMPT, session=SessionUse(use), max_tokens=6, **options)
    history = [*PROMPT, *first.token_ids]

    exact = driver.command(SessionVerb.READ, use, history)
    own = driver.command(SessionVerb.READ, use, history, window=window)
    driver.command(SessionVerb.SUSPEND, use, history, window=window)
    second = driver.run([*history, 7], session=SessionUse(use, len(history)), max_tokens=6, **options)

    assert (exact.device_tokens, own.device_tokens) == (0, 48)
    assert second.cache is not None
    assert second.cache.host_tokens == 48
    assert second.token_ids == streamed(models.references[None], [*history, 7], 2, 9, 6)
    closed = driver.command(SessionVerb.CLOSE, use, [*history, 7, *second.token_ids], window=window)
    assert (closed.device_tokens, closed.host_tokens) == (0, 0)
    driver.loop.check_integrity()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"attention_window": 0}, "attention_window"),
        ({"attention_window": 4, "attention_sinks": -1}, "attention_sinks"),
        ({"attention_sinks": 4}, "attention_sinks"),
    ],
)
def test_wrong_windows_are_refused(make_engine: Make, options: dict[str, int], param: str) -> None:
    """A window of nothing, fewer than no sinks, and sinks without a window."""
    found = make_engine(kernels="torch").run([3, 4, 5], **options)

    assert isinstance(found.error, InvalidRequest)
    assert found.error.param == param


def test_engines_that_cannot_do_it_say_why(models: RandomModels, tmp_path: Path) -> None:
    """Recurrent layers: the limits of the engine have the reason, which it tells. Several ranks and GPUs serve windows."""
    model, cpu = read_model_config(models.base), torch.device("cpu")
    plain = EngineConfig(models.base)
    hybrid = make_family(HYBRID_FAMILIES["granite-hybrid"], tmp_path, ())

    def why(config: EngineConfig, device: torch.device = cpu) -> str | None:
        return scheduler_limits(config, model, device).why_no_windows

    assert why(plain) is None
    assert why(replace(plain, tensor_parallel=2)) is None
    assert why(plain, torch.device("cuda")) is None
    found = hybrid.engine(max_running=4).run([3, 4, 5], attention_window=8)
    assert isinstance(found.error, InvalidRequest)
    assert found.error.message.startswith("attention_window is not served here: the model has recurrent layers")


OTHERS = ("llama-yarn", "gemma2", "cohere2", "glm4", "gpt-oss", "smollm3-windows", "phi4-long", "gemma3n")


@pytest.mark.parametrize("name", OTHERS)
def test_a_window_over_the_whole_text_changes_nothing_in_any_family(name: str, tmp_path: Path) -> None:
    """Caps, learned sinks, windows of layers, and layers without rotation are those of the exact attention."""
    driver = make_family((FAMILIES | EXPERT_FAMILIES)[name], tmp_path, ()).engine(kernels="torch", max_batch_tokens=16)
    options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    prompt = [2 + (place * 31) % 60 for place in range(30)]

    exact, wide = driver.run(prompt, **options), driver.run(prompt, attention_window=40, **options)

    for one, other in zip(
        (*exact.prompt_logprobs, *exact.logprobs), (*wide.prompt_logprobs, *wide.logprobs), strict=True
    ):
        assert one.logprob == pytest.approx(other.logprob, abs=2e-5)


@pytest.mark.filterwarnings("ignore:.*original_max_position_embeddings.*")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_turned_query_is_one_of_an_earlier_position(name: str, tmp_path: Path) -> None:
    """For every kind of rotary embedding, a query rotated to position p and turned back by d is that of position p - d."""
    FAMILIES[name].save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    if not settings.get("architectures"):
        model_class: Any = AutoModelForCausalLM
        settings["architectures"] = [type(model_class.from_config(FAMILIES[name])).__name__]
        (tmp_path / "config.json").write_text(json.dumps(settings))
    model = read_model_config(tmp_path)
    query = torch.randn(5, 3, model.head_dim, generator=torch.Generator().manual_seed(1))
    positions, distances = torch.tensor([0, 7, 20, 33, 50]), torch.tensor([0, 7, 3, 33, 1])
    for rope in dict.fromkeys(model.ropes):
        if rope is not None:
            table = RotaryTable(model.head_dim, rope, model.context_tokens, torch.device("cpu"))
            turn = RotaryTurn(model.head_dim, rope, model.context_tokens, torch.device("cpu"))
            there = table.rotate(query, *table.at(positions))
            expected = table.rotate(query, *table.at(positions - distances))
            assert torch.allclose(turn.back(there, distances), expected, atol=1e-5)
