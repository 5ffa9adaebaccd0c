"""Layers with a sliding window keep only its pages: answers, memory and every way back to a cached prefix."""

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig, Gemma3TextConfig, MistralConfig

from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb, ToolWait
from graftwork.engine.core.tiers import Tier
from graftwork.platform.errors import InvalidRequest
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.families import GEMMA3_ROPES, GEMMA3N, SIZES, Family, make_family
from tests.engine.runner.test_decoder_parity import RecordingRunner

PAGE, WINDOW, CONTEXT = 4, 10, 256
DEEP = SIZES | {"num_hidden_layers": 6, "max_position_embeddings": CONTEXT, "sliding_window": WINDOW}
FIVE_OF_SIX = ["sliding_attention"] * 5 + ["full_attention"]
MODELS = {
    "five of six": Gemma3TextConfig(**DEEP, layer_types=FIVE_OF_SIX, head_dim=8, rope_parameters=GEMMA3_ROPES),
    "all": MistralConfig(**DEEP),
    "five of six, and two that read them": Gemma3nTextConfig(
        **GEMMA3N | DEEP | {"num_hidden_layers": 8, "layer_types": [*FIVE_OF_SIX, *FIVE_OF_SIX[4:]]},
        num_kv_shared_layers=2,
    ),
}


@dataclass(frozen=True)
class Windowed:
    """A model whose layers have windows, and its engines."""

    family: Family

    def engine(self, **options: Any) -> EngineDriver:
        sizes = {"device_bytes": 5 * 2**16, "host_kv_bytes": 2**18}
        return self.family.engine(**sizes | {"max_batch_tokens": 16, "max_running": 4, "max_draft_tokens": 4} | options)

    def straight(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The greedy answer of an engine without a cache whose layers all keep the whole context."""
        driver = self.engine(window_groups=False, max_draft_tokens=0)
        return run(driver, prompt, num_tokens).token_ids

    def expected_logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self.family.references[None](torch.tensor([token_ids])).logits
        return logits[0, -1]


@pytest.fixture(scope="module", params=MODELS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Windowed:
    torch.set_num_threads(1)
    return Windowed(make_family(MODELS[request.param], tmp_path_factory.mktemp("windowed"), ()))


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(2, 97) for _ in range(length)]


def run(driver: EngineDriver, prompt: list[int], num_tokens: int, **options: Any) -> Outcome:
    """Runs one request. Pages that nobody holds are filled with NaN now and then, so none of them is read."""
    outcome = driver.submit(prompt, max_tokens=num_tokens, ignore_eos=True, **options)
    check_each_step(driver, [outcome])
    return outcome


def check_each_step(driver: EngineDriver, outcomes: list[Outcome]) -> None:
    """Runs requests to their end, and checks the engine between steps."""
    for number in count():
        if all(outcome.is_over for outcome in outcomes):
            break
        if number % 3 == 0:
            driver.poison_unused_pages()
            driver.engine.scheduler.check_integrity()
        driver.step()


def cached_tokens(outcome: Outcome) -> int:
    assert outcome.cache is not None
    return outcome.cache.cached_tokens


@pytest.mark.parametrize("length", [7, 60], ids=["shorter than the window", "longer"])
@pytest.mark.parametrize("max_batch_tokens", [16, 256], ids=["chunks", "whole"])
def test_logits_are_those_of_transformers_with_and_without_cached_prefixes(
    windowed: Windowed, length: int, max_batch_tokens: int
) -> None:
    """In prefill, chunks and decode, and after a cached prefix, each sampled row has the reference's logits."""
    driver = windowed.engine(max_batch_tokens=max_batch_tokens)
    recorder = driver.loop.steps.runner = RecordingRunner(driver)
    prompt = prompt_of(length, length)
    longer = [*prompt, *prompt_of(1, 21)]

    outcomes = [run(driver, tokens, 20) for tokens in (prompt, longer, prompt)]

    assert len(recorder.rows) == 60
    for number, (piece, logits) in enumerate(recorder.rows):
        tokens, outcome = (prompt, longer, prompt)[number // 20], outcomes[number // 20]
        expected = windowed.expected_logits([*tokens, *outcome.token_ids][: piece.end])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert [cached_tokens(outcome) for outcome in outcomes] == [0, length // PAGE * PAGE, (length - 1) // PAGE * PAGE]


def test_a_long_request_holds_what_arithmetic_says(windowed: Windowed) -> None:
    """While a request decodes, its windowed layer groups hold the pages of the window, and no more."""
    driver = windowed.engine(max_draft_tokens=0)
    outcome = driver.submit(prompt_of(3, 150), max_tokens=80, ignore_eos=True)
    pool, (sizes, groups) = driver.engine.kv_cache.page_store.device, (kv_sizes(driver), driver.engine.cache.groups)
    held: list[tuple[int, int]] = []
    while not outcome.is_over:
        driver.step()
        if outcome.token_ids and not outcome.is_over:
            held.append((150 + len(outcome.token_ids) - 1, pool.active_pages))

    assert len(groups.groups) == 6
    assert len(held) > 70
    for num_computed, pages in held:
        whole = num_computed // PAGE
        first_seen = (whole * PAGE - WINDOW + 1) // PAGE  # the oldest key of a query at the last page's end
        whole_context, window = -(-num_computed // PAGE), -(-num_computed // PAGE) - (first_seen - 1)
        assert pages == whole_context + 5 * window
    tokens, pages = held[-1]
    assert pages * sizes.page_bytes < 0.35 * -(-tokens // PAGE) * bytes_of_all_layers(windowed)


def kv_sizes(driver: EngineDriver) -> Any:
    return driver.engine.kv_cache.page_store.sizes


def bytes_of_all_layers(windowed: Windowed) -> int:
    """The bytes of one page whose layers all keep the whole context."""
    page_bytes: int = kv_sizes(windowed.engine(window_groups=False)).page_bytes
    return page_bytes


def test_the_smallest_device_is_smaller_by_the_windows(windowed: Windowed) -> None:
    """The device need not have room for the whole context of windowed layers, and the smallest one serves it."""
    least = [smallest(windowed, window_groups=has_groups) for has_groups in (True, False)]
    prompt = prompt_of(5, CONTEXT - 30)

    outcome = run(windowed.engine(device_bytes=least[0]), prompt, 30)

    assert least[0] < 0.55 * least[1]
    assert outcome.token_ids == windowed.straight(prompt, 30)


def test_forks_and_rewinds_use_the_cache_and_answer_the_same(windowed: Windowed) -> None:
    """Prompts that go on from an earlier end, from the middle of a prompt or of an answer answer as a cold run does."""
    driver = windowed.engine()
    prompt = prompt_of(7, 90)
    first = run(driver, prompt, 30)
    history = [*prompt, *first.token_ids]
    cases = {
        "end": ([*history, 5, 6, 7], 116),
        "middle of the prompt": ([*prompt[:70], 5, 6, 7], 68),
        "the same prompt": (prompt, 88),
        "a branch of a branch": ([*prompt[:70], 5, 6, 8], 72),
        "middle of the answer": ([*history[:105], 5, 6, 7], None),
    }

    for name, (tokens, cached) in cases.items():
        outcome = run(driver, tokens, 12)

        assert outcome.token_ids == windowed.straight(tokens, 12), name
        assert cached is None or cached_tokens(outcome) == cached, name


@pytest.mark.parametrize("overlap_loads", [False, True], ids=["waits for loads", "overlaps loads"])
def test_a_session_goes_on_from_every_tier(windowed: Windowed, tmp_path: Path, overlap_loads: bool) -> None:
    """The second turn has the tokens of a cold run from the device, the host and the disk of an ended process."""
    options: dict[str, Any] = {"disk_kv_bytes": 2**22, "kv_folder": tmp_path, "host_kv_bytes": 2**19}
    options["overlap_loads"] = overlap_loads
    driver = windowed.engine(**options)
    prompt = prompt_of(9, 61)
    history = [*prompt, *run(driver, prompt, 25, session=SessionUse(SessionKey("s"))).token_ids]
    second = [*history, 8, 9, 10]
    expected = windowed.straight(second, 12)

    def turn(own: EngineDriver) -> Outcome:
        return run(own, second, 12, session=SessionUse(SessionKey("s"), len(history)))

    driver.command(SessionVerb.HOLD, "s", history, ToolWait("search"))
    warm = turn(driver)
    driver.command(SessionVerb.HOLD, "s", [*second, *warm.token_ids])
    suspended = driver.command(SessionVerb.SUSPEND, "s", [*second, *warm.token_ids])
    from_host = turn(driver)
    driver.command(SessionVerb.HOLD, "s", history)
    driver.close()
    restarted = windowed.engine(**options)
    from_disk = turn(restarted)
    restarted.command(SessionVerb.CLOSE, "s", [*second, *from_disk.token_ids])
    left = restarted.loop.stats()
    restarted.close()

    assert [outcome.token_ids for outcome in (warm, from_host, from_disk)] == [expected] * 3
    assert (suspended.device_tokens, suspended.device_bytes) == (0, 0)
    assert warm.cache is not None
    assert warm.cache.device_tokens == 84
    assert from_host.cache is not None
    assert from_host.cache.host_tokens == 88
    assert from_disk.cache is not None
    assert from_disk.cache.disk_tokens == 88
    assert (left.cached_pages, left.host_cached_pages, left.disk_pages) == (0, 0, 0)


@pytest.mark.parametrize("num_groups", ["some", "all"])
def test_a_damaged_page_of_any_group_is_computed_again(windowed: Windowed, tmp_path: Path, num_groups: str) -> None:
    """If pages on disk are damaged, of windowed groups alone or of all, the answer is that of a cold run."""
    options: dict[str, Any] = {"disk_kv_bytes": 2**22, "kv_folder": tmp_path, "host_kv_bytes": 2**19}
    driver = windowed.engine(**options)
    prompt = prompt_of(13, 61)
    history = [*prompt, *run(driver, prompt, 5, session=SessionUse(SessionKey("s"))).token_ids]
    driver.command(SessionVerb.HOLD, "s", history)
    driver.close()
    files = [path for path in tmp_path.iterdir() if path.stat().st_size > 4096]
    for path in files:
        content = bytearray(path.read_bytes())
        for place in (-5,) if num_groups == "some" else range(-5, 4096 - len(content), -256):
            content[place] ^= 255  # the last page of a file is that of a windowed group
        path.write_bytes(content)
    restarted = windowed.engine(**options)

    outcome = run(restarted, [*history, 5, 6], 12, session=SessionUse(SessionKey("s"), len(history)))

    assert files
    assert outcome.token_ids == windowed.straight([*history, 5, 6], 12)
    assert restarted.loop.stats().disk_corrupt_files > 0
    assert cached_tokens(outcome) == 0
    restarted.close()


def test_a_session_holds_the_bytes_that_it_reports(windowed: Windowed) -> None:
    """A session reports the bytes of all its pages on each tier: the whole context, and the windows at its end."""
    driver = windowed.engine(host_kv_bytes=2**19)
    prompt = prompt_of(11, 120)
    history = [*prompt, *run(driver, prompt, 9, session=SessionUse(SessionKey("s"))).token_ids]

    driver.command(SessionVerb.HOLD, "s", history)
    memory = driver.command(SessionVerb.READ, "s", history)

    tree, page_bytes = driver.engine.kv_cache.page_store.tree, kv_sizes(driver).page_bytes
    assert memory.device_bytes == tree.num_copies(Tier.DEVICE) * page_bytes
    assert memory.host_bytes == tree.num_copies(Tier.HOST) * page_bytes
    assert memory.host_bytes == (32 + 5 * (32 - ((128 - WINDOW + 1) // PAGE - 1))) * page_bytes


@pytest.mark.parametrize("host_kv_bytes", [0, 2**19])
def test_requests_that_outgrow_the_device_together_answer_the_same_as_alone(
    windowed: Windowed, host_kv_bytes: int
) -> None:
    """Three long requests on a device for one context are preempted in turn, and each answers as alone."""
    prompts = [prompt_of(20 + number, 30) for number in range(3)]
    alone = [windowed.straight(prompt, 100) for prompt in prompts]
    options: dict[str, Any] = {"max_batch_tokens": 4, "max_draft_tokens": 0}
    least = smallest(windowed, **options)
    driver = windowed.engine(device_bytes=least, host_kv_bytes=host_kv_bytes, **options)

    outcomes = [
        driver.submit(prompt, max_tokens=100, ignore_eos=True, domain=bytes([number]))
        for number, prompt in enumerate(prompts)
    ]
    check_each_step(driver, outcomes)

    assert [outcome.token_ids for outcome in outcomes] == alone
    assert driver.loop.stats().preemptions > 0


def smallest(windowed: Windowed, **options: Any) -> int:
    """The bytes of the smallest device with which an engine starts, as the refusal of a smaller one says."""
    with pytest.raises(InvalidRequest, match="--device-bytes") as caught:
        windowed.engine(device_bytes=2**14, **options)
    return int(str(caught.value).rsplit(" bytes", 1)[0].rsplit(" ", 1)[1])


def test_drafts_that_are_rejected_change_no_token(windowed: Windowed) -> None:
    """With drafts of which some are rejected, the answer is that of a run without them, and pages stay where they are."""
    prompt = (prompt_of(30, 9) * 12)[:100]
    expected = windowed.straight(prompt, 60)
    wrong = tuple(token if place % 5 else 3 for place, token in enumerate(expected))

    outcome = run(windowed.engine(), prompt, 60, prediction=wrong)

    assert outcome.token_ids == expected
    assert outcome.drafts.accepted_tokens > 0
    assert outcome.drafts.drafted_tokens > outcome.drafts.accepted_tokens


@pytest.mark.parametrize("overlap_steps", [True, False])
def test_many_requests_with_a_common_prompt_share_its_windows(windowed: Windowed, overlap_steps: bool) -> None:
    """Requests that branch off one prompt start after it, and answer as cold runs do."""
    driver = windowed.engine(overlap_steps=overlap_steps)
    system = prompt_of(40, 64)
    prompts = [[*system, *prompt_of(41 + number, 5 + number)] for number in range(4)]
    run(driver, system, 1)

    outcomes = [driver.submit(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
    driver.finish()

    assert [cached_tokens(outcome) for outcome in outcomes] == [64] * 4
    assert [outcome.token_ids for outcome in outcomes] == [windowed.straight(prompt, 30) for prompt in prompts]
    driver.engine.scheduler.check_integrity()
