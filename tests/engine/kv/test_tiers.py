"""Tests that no token and no byte depends on the tier from which KV came."""

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
import torch

from graftwork.engine.core.events import MissReason
from graftwork.engine.core.prefix_keys import child_key, root_key
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionMemory, SessionVerb, ToolWait
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.disk.store import DiskStore
from graftwork.engine.kv.index.radix_tree import Node
from graftwork.engine.kv.transfer.copier import PageCopier
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.host_memory import HostMemory
from graftwork.engine.kv.transfer.plan import LoadReadable, PageMove, TransferDone, TransferKind, TransferPlan
from graftwork.engine.messages import ForgetDomain
from graftwork.engine.model.config import read_model_config
from graftwork.platform.clock import SystemClock
from graftwork.platform.ids import IsolationDomain
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver, Outcome

MakeEngine = Callable[..., EngineDriver]

FIRST = [5 + n % 50 for n in range(41)]
SECOND = [9, 8, 7, 6, 5, 4, 3]
SMALLEST = 2**16 + 2**11
"""Bytes of the smallest device on which the test model runs: one context, and the smallest adapter."""
ADAPTERS = [None, "sha256:wide", "sha256:narrow"]


def first_turn(driver: EngineDriver, adapter: str | None) -> list[int]:
    """Runs a session's first turn. Returns its history."""
    outcome = driver.run(FIRST, adapter=adapter, session=SessionUse(SessionKey("s")), max_tokens=9, ignore_eos=True)
    return FIRST + outcome.token_ids


def second_turn(driver: EngineDriver, history: list[int], adapter: str | None, **options: Any) -> Outcome:
    use = SessionUse(SessionKey(options.pop("session", "s")), len(history))
    prompt = history + SECOND
    return driver.run(prompt, adapter=adapter, session=use, max_tokens=12, ignore_eos=True, **options)


def cold(make_engine: MakeEngine, history: list[int], adapter: str | None, **options: Any) -> list[int]:
    """Returns the second turn's tokens from a new engine."""
    return second_turn(make_engine(**options), history, adapter).token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_session_continues_the_same_from_the_device_the_host_and_the_disk(
    make_engine: MakeEngine, tmp_path: Path, adapter: str | None, dtype: str
) -> None:
    """The second turn has the same tokens from the device, from the host and from the disk of an ended process, and
    each report adds up; in fp32 a cold engine gives them too.

    In bf16 a cold engine computes in chunks what was computed token by token, and rounds differently.
    """
    options = {"dtype": dtype, "disk_kv_bytes": 2**22, "kv_folder": tmp_path}
    driver = make_engine(**options)
    history = first_turn(driver, adapter)
    expected = cold(make_engine, history, adapter, dtype=dtype)

    driver.command(SessionVerb.HOLD, "s", history, ToolWait("search"), adapter=adapter)
    warm = second_turn(driver, history, adapter)
    head = history + SECOND + warm.token_ids
    driver.command(SessionVerb.SUSPEND, "s", head, adapter=adapter)
    suspended = driver.command(SessionVerb.READ, "s", head, adapter=adapter)
    from_host = second_turn(driver, history, adapter)
    driver.close()
    restarted = make_engine(**options)
    from_disk = second_turn(restarted, history, adapter)
    restarted.close()

    assert warm.token_ids == from_host.token_ids == from_disk.token_ids
    assert warm.token_ids == expected or dtype == "bfloat16"
    assert suspended.device_tokens == 0
    assert suspended.host_tokens == 68
    reports = [outcome.cache for outcome in (warm, from_host, from_disk)]
    assert [report.device_tokens for report in reports if report] == [48, 0, 0]
    assert [report.host_tokens for report in reports if report] == [0, 56, 0]
    assert [report.disk_tokens for report in reports if report] == [0, 0, 56]
    assert all(report.prompt_tokens == len(history) + len(SECOND) for report in reports if report)


def test_forks_and_rewinds_share_what_they_have_in_common(make_engine: MakeEngine) -> None:
    """A fork and a rewound session use the cache and answer as cold engines do."""
    driver = make_engine()
    history = first_turn(driver, None)
    second = second_turn(driver, history, None)

    forked = second_turn(driver, history, None, session="child")
    rewound = second_turn(driver, history[:40], None)

    assert forked.token_ids == second.token_ids
    assert rewound.token_ids == cold(make_engine, history[:40], None)
    assert forked.cache is not None
    assert forked.cache.device_tokens >= 48
    assert rewound.cache is not None
    assert rewound.cache.device_tokens >= 40


@pytest.mark.parametrize("host_kv_bytes", [0, 2**22])
def test_requests_that_outgrow_the_device_together_answer_the_same_as_alone(
    make_engine: MakeEngine, host_kv_bytes: int
) -> None:
    """With pages for one context, three long answers at once are preempted in turn and are the same as each alone."""
    random = Random(3)
    prompts = [[random.randrange(3, 90) for _ in range(30)] for _ in range(3)]
    alone = [make_engine().run(prompt, max_tokens=90, ignore_eos=True).token_ids for prompt in prompts]
    driver = make_engine(device_bytes=SMALLEST, host_kv_bytes=host_kv_bytes)

    outcomes = [
        driver.submit(prompt, max_tokens=90, ignore_eos=True, domain=bytes([number]))
        for number, prompt in enumerate(prompts)
    ]
    driver.finish()

    assert [outcome.token_ids for outcome in outcomes] == alone
    assert driver.loop.stats().preemptions > 0


def test_closing_every_session_empties_every_tier(make_engine: MakeEngine, tmp_path: Path) -> None:
    """After two sessions with a common prefix are closed, no tier holds a page and no file is left."""
    driver = make_engine(disk_kv_bytes=2**22, kv_folder=tmp_path)
    history = first_turn(driver, None)
    longer = history + SECOND + second_turn(driver, history, None, session="t").token_ids
    for name, tokens in (("s", history), ("t", longer)):
        driver.command(SessionVerb.HOLD, name, tokens, ToolWait("search"))
    full = driver.loop.stats()

    for name, tokens in (("s", history), ("t", longer)):
        driver.command(SessionVerb.CLOSE, name, tokens)

    stats = driver.loop.stats()
    assert full.cached_pages > 0
    assert full.host_cached_pages > 0
    assert full.disk_pages > 0
    assert (stats.cached_pages, stats.active_pages, stats.in_flight_pages) == (0, 0, 0)
    assert (stats.host_cached_pages, stats.host_in_flight_pages, stats.disk_pages) == (0, 0, 0)
    driver.close()
    assert list(tmp_path.iterdir()) == []


def test_a_forgotten_domain_leaves_nothing_on_any_tier(make_engine: MakeEngine, tmp_path: Path) -> None:
    """After one of two tenants is forgotten, only its history and files are gone, and a new engine on the same folder
    finds only the other's."""
    driver = make_engine(disk_kv_bytes=2**22, kv_folder=tmp_path)
    for domain in (b"gone", b"stays"):
        driver.run(FIRST, domain=domain, session=SessionUse(SessionKey("s")), max_tokens=1)
        driver.command(SessionVerb.HOLD, "s", FIRST, domain=domain)
    before = driver.command(SessionVerb.READ, "s", FIRST, domain=b"stays")
    num_pages = driver.loop.stats().disk_pages

    driver.loop.take(ForgetDomain(IsolationDomain(b"gone")))

    assert driver.command(SessionVerb.READ, "s", FIRST, domain=b"gone") == SessionMemory(missing_tokens=len(FIRST))
    assert driver.command(SessionVerb.READ, "s", FIRST, domain=b"stays") == before
    assert before.disk_bytes > 0
    assert driver.loop.stats().disk_pages == num_pages // 2
    driver.close()
    restarted = make_engine(disk_kv_bytes=2**22, kv_folder=tmp_path)
    assert restarted.loop.stats().disk_pages == num_pages // 2
    assert restarted.command(SessionVerb.READ, "s", FIRST, domain=b"stays").disk_bytes == before.disk_bytes
    restarted.close()


def test_tenants_share_a_public_prefix_and_nothing_after_it(make_engine: MakeEngine) -> None:
    """Another tenant finds the four whole pages of an 18-token public prefix and answers as a cold engine does; it
    finds nothing of a private prompt."""
    driver = make_engine()
    expected = make_engine().run(FIRST).token_ids
    driver.run(FIRST, domain=b"a", public_tokens=18)

    shared = driver.run(FIRST, domain=b"b", public_tokens=18)
    private = driver.run(FIRST, domain=b"c")
    again = driver.run(FIRST, domain=b"b", public_tokens=18)

    assert [one.cache.device_tokens for one in (shared, private, again) if one.cache] == [16, 0, 40]
    assert shared.token_ids == private.token_ids == again.token_ids == expected


def test_a_miss_after_a_change_of_adapter_says_so(make_engine: MakeEngine) -> None:
    """A session that has got another adapter between its turns is told `adapter_changed`, though its KV was freed."""
    driver = make_engine()
    history = first_turn(driver, None)

    driver.command(SessionVerb.CHANGE, "s", history)
    outcome = second_turn(driver, history, "sha256:wide")

    assert driver.command(SessionVerb.READ, "s", history).device_bytes == 0
    assert outcome.cache is not None
    assert outcome.cache.miss_reason == MissReason.ADAPTER_CHANGED


def test_a_miss_says_why(make_engine: MakeEngine) -> None:
    """Another adapter, an edited history and a restarted engine each report their own reason."""
    driver = make_engine()
    history = first_turn(driver, None)
    edited = [70, 71, *history[2:]]

    reasons = {
        "restarted": second_turn(make_engine(), history, None).cache,
        "adapter": second_turn(driver, history, "sha256:wide").cache,
        "edited": second_turn(driver, edited, "sha256:wide").cache,
        "new": make_engine().run(FIRST).cache,
        "none": driver.run(history + SECOND).cache,
    }

    assert {name: report.miss_reason for name, report in reasons.items() if report} == {
        "restarted": MissReason.RESTARTED,
        "adapter": MissReason.ADAPTER_CHANGED,
        "edited": MissReason.HISTORY_EDITED,
        "new": MissReason.NEVER_CACHED,
        "none": None,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("page_tokens", "padding"), [(4, 0), (16, 0), (16, 40)])
def test_every_round_trip_brings_back_the_same_bytes(
    models: RandomModels, tmp_path: Path, dtype: torch.dtype, page_tokens: int, padding: int
) -> None:
    """Random pages that go to the host and to disk come back to other device pages with the same bits."""
    model = read_model_config(models.base)
    device_memory = DeviceMemory(12, bytes_per_page(model, page_tokens, dtype) + padding, torch.device("cpu"))
    cache = KvCache(model, device_memory, page_tokens, dtype)
    host = HostMemory(4, cache.page_shape, dtype)
    noise = torch.randint(0, 256, (4, host.page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    originals = noise.view(dtype).view(4, *cache.page_shape)
    for page in range(4):
        cache.write_page(page, originals[page])
    files = DiskStore(tmp_path, 2**22, bytes(32))
    files.open()
    reports: SimpleQueue[TransferDone | LoadReadable] = SimpleQueue()
    copier = PageCopier(cache, host, files, reports.put, SystemClock())
    keys = [child_key(root_key(b"scope"), [number]) for number in range(4)]

    def carry_out(kind: TransferKind, source: int | None, target: int | None) -> None:
        places = [
            (None if source is None else PageId(source + n), None if target is None else PageId(target + n))
            for n in range(4)
        ]
        moves = tuple(PageMove(key, *place) for key, place in zip(keys, places, strict=True))
        nodes = tuple(Node(None, key, 0, b"domain", 0) for key in keys)
        copier.begin(TransferPlan(kind, b"domain", moves, nodes))
        done = reports.get(timeout=60)
        assert isinstance(done, TransferDone)
        assert done.num_good == 4

    carry_out(TransferKind.SAVE, 0, 0)
    carry_out(TransferKind.LOAD, 0, 4)
    carry_out(TransferKind.STORE, 0, None)
    carry_out(TransferKind.FETCH, None, 8)
    copier.close()

    read = torch.empty((4, *cache.page_shape), dtype=dtype)
    for first in (4, 8):
        for page in range(4):
            cache.read_page(first + page, read[page])
        assert torch.equal(read.view(torch.uint8).view(4, -1), noise)
