"""KV in bytes: half the memory on every tier, and the same tokens from each of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from graftwork.engine.attention.backend import PlacedSlice
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.engine.core.step import KvEviction
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kv.transfer.device_memory import DeviceMemory, KvCache, bytes_per_page
from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.engine.runner.prompt_evictor import PromptEvictor
from tests.engine.adapter_kinds import AdapterKinds
from tests.engine.attention.batches import piece
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.runner.row_sides import MODEL, PAGE_TOKENS
from tests.engine.tagged_kv_cache import load_always

MakeEngine = Callable[..., EngineDriver]
FORMS = ["int8", "fp8"]
FIRST = [5 + n % 50 for n in range(41)]
SECOND = [9, 8, 7, 6, 5, 4, 3]


def turn(driver: EngineDriver, history: list[int], *, session: str = "s", known: int = 0, **options: Any) -> list[int]:
    """Runs a turn of a session whose first `known` tokens it has. Returns the answer."""
    use = SessionUse(SessionKey(session), known) if known else SessionUse(SessionKey(session))
    outcome = driver.run(history, session=use, **{"max_tokens": 12, "ignore_eos": True} | options)
    assert outcome.error is None
    return outcome.token_ids


@pytest.mark.parametrize("kv_dtype", FORMS)
@pytest.mark.parametrize("adapter", [None, "sha256:wide"])
def test_every_tier_and_a_restart_give_the_same_tokens(
    make_engine: MakeEngine, tmp_path: Path, kv_dtype: str, adapter: str | None
) -> None:
    """The second turn has the same tokens on a cold engine, and with KV of the device, the host and the disk."""
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "disk_kv_bytes": 2**22, "kv_folder": tmp_path}
    driver = make_engine(**options)
    history = FIRST + turn(driver, FIRST, adapter=adapter)
    cold = turn(make_engine(kv_dtype=kv_dtype), history + SECOND, adapter=adapter)

    warm = turn(driver, history + SECOND, known=len(history), adapter=adapter)
    head = history + SECOND + warm
    driver.command(SessionVerb.SUSPEND, "s", head, adapter=adapter)
    suspended = driver.command(SessionVerb.READ, "s", head, adapter=adapter)
    from_host = turn(driver, history + SECOND, known=len(history), adapter=adapter)
    driver.close()
    restarted = make_engine(**options)
    from_disk = turn(restarted, history + SECOND, known=len(history), adapter=adapter)
    restarted.close()

    assert suspended.device_tokens == 0
    assert cold == warm == from_host == from_disk


@pytest.mark.parametrize("kv_dtype", FORMS)
def test_forks_rewinds_and_drafts_change_nothing(make_engine: MakeEngine, kv_dtype: str) -> None:
    """A fork, a rewound session and an engine without drafts answer as the straight run does."""
    driver = make_engine(kv_dtype=kv_dtype)
    repeated = FIRST + FIRST
    answer = turn(driver, repeated, max_tokens=24)
    history = repeated + answer

    straight = turn(driver, history + SECOND, known=len(history))
    forked = turn(driver, history + SECOND, session="child", known=len(history))
    rewound = turn(driver, history[:60] + SECOND, known=60)

    undrafted = make_engine(kv_dtype=kv_dtype, max_draft_tokens=0)
    assert turn(undrafted, repeated, max_tokens=24) == answer
    assert forked == straight
    assert rewound == turn(make_engine(kv_dtype=kv_dtype), history[:60] + SECOND)


@pytest.mark.parametrize("kv_dtype", FORMS)
def test_preempted_requests_answer_as_alone(make_engine: MakeEngine, kv_dtype: str) -> None:
    """Requests that outgrow the device together, so that some are preempted, answer as they do alone."""
    prompts = [[seed + n % 40 for n in range(30)] for seed in (3, 11, 19, 27)]
    roomy = make_engine(kv_dtype=kv_dtype)
    alone = [roomy.run(prompt, max_tokens=120, ignore_eos=True).token_ids for prompt in prompts]
    smallest = 2 * 2 * 256 * 2 * (8 + 2)  # one context: keys and values, layers, tokens, heads, bytes
    crowded = make_engine(kv_dtype=kv_dtype, device_bytes=smallest + 2**12, host_kv_bytes=2**22)

    outcomes = [crowded.submit(prompt, max_tokens=120, ignore_eos=True) for prompt in prompts]
    crowded.finish()

    assert crowded.loop.stats().preemptions > 0
    assert [outcome.token_ids for outcome in outcomes] == alone


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with heads of 128 features, as most models have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def wide_engine(wide: Path, **options: Any) -> EngineDriver:
    settings: dict[str, Any] = {"dtype": "bfloat16", "page_tokens": 4, "device_bytes": 2**22} | options
    config = EngineConfig(model=wide, **settings)
    return EngineDriver(build_engine(config, lambda _: AdapterKinds(wide, {}, {}), costs=load_always()))


def tier_bytes(wide: Path, folder: Path, kv_dtype: str) -> list[int]:
    """Returns the bytes of a session of 40 tokens on the device, the host and the disk, and those of its files."""
    driver = wide_engine(wide, kv_dtype=kv_dtype, disk_kv_bytes=2**22, kv_folder=folder)
    history = FIRST + turn(driver, FIRST, max_tokens=2)
    driver.command(SessionVerb.PREFETCH, "s", history)
    on_device = driver.command(SessionVerb.READ, "s", history)
    driver.command(SessionVerb.SUSPEND, "s", history)
    below = driver.command(SessionVerb.READ, "s", history)
    driver.close()
    return [on_device.device_bytes, below.host_bytes, below.disk_bytes]


@pytest.mark.parametrize("kv_dtype", FORMS)
def test_a_session_takes_half_the_bytes_on_every_tier(wide: Path, tmp_path: Path, kv_dtype: str) -> None:
    """A session takes 130 bytes for each 256 of bf16 on the device, in host memory and on disk."""
    plain, coded = tier_bytes(wide, tmp_path / "plain", "auto"), tier_bytes(wide, tmp_path / "coded", kv_dtype)

    assert all(plain)
    assert [size / of for size, of in zip(coded, plain, strict=True)] == [130 / 256] * 3


@pytest.mark.parametrize("kv_dtype", FORMS)
def test_attention_reads_what_was_stored(wide: Path, kv_dtype: str) -> None:
    """The log probabilities are those of transformers when its cache holds the same rounded keys and values."""
    driver = wide_engine(wide, kv_dtype=kv_dtype, dtype="float32")
    outcome = driver.run(FIRST, max_tokens=8, ignore_eos=True, logprobs=0)
    form = driver.engine.cache.format

    class RoundedCache(DynamicCache):
        """A cache that rounds what it is given, as the engine stores it."""

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = (form.decode(form.encode(each.contiguous())) for each in (key_states, value_states))
            return super().update(keys, values, layer_idx, *args, **kwargs)

    model = LlamaForCausalLM.from_pretrained(wide, dtype=torch.float32)
    token_ids = torch.tensor([FIRST + outcome.token_ids])
    with torch.inference_mode():
        rows = model(token_ids, past_key_values=RoundedCache()).logits[0, len(FIRST) - 1 : -1].log_softmax(1)
    found = torch.tensor([one.logprob for one in outcome.logprobs])
    expected = rows[torch.arange(8), torch.tensor(outcome.token_ids)]
    assert torch.allclose(found, expected, atol=2e-3)
    assert not torch.equal(found, torch.tensor([one.logprob for one in plain_run(wide)]))


def plain_run(wide: Path) -> list[Any]:
    driver = wide_engine(wide, dtype="float32")
    return driver.run(FIRST, max_tokens=8, ignore_eos=True, logprobs=0).logprobs


def test_formats_share_no_file(make_engine: MakeEngine, tmp_path: Path) -> None:
    """An engine reads its own format's KV from disk after a restart, and never that of another format."""
    found: list[int] = []
    for kv_dtype in ("auto", "int8", "fp8", "int8"):
        driver = make_engine(kv_dtype=kv_dtype, disk_kv_bytes=2**22, kv_folder=tmp_path)
        outcome = driver.run(FIRST, session=SessionUse(SessionKey("s")), max_tokens=2)
        driver.command(SessionVerb.SUSPEND, "s", FIRST)
        driver.close()
        assert outcome.cache is not None
        found.append(outcome.cache.disk_tokens)

    assert found == [0, 0, 0, 40]


def test_two_devices_store_what_one_does(models: RandomModels) -> None:
    """Tensor parallelism stores each device's heads in bytes, without changing a token."""
    alone, together = models.engine(kv_dtype="int8"), models.engine(kv_dtype="int8", tensor_parallel=2)

    try:
        assert turn(alone, FIRST) == turn(together, FIRST)
    finally:
        together.close()


class NoAttention:
    """Attention that computes nothing."""

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return query.flatten(1)


@pytest.mark.parametrize("kv_dtype", FORMS)
def test_a_prompt_is_evicted_by_codes_and_scales(kv_dtype: str) -> None:
    """A prompt that keeps a part of its KV copies codes with their scales: the tokens that the same keys as numbers keep, and
    zeros behind them."""
    prompt, kept, sources, targets = 90, 45, list(range(23)), list(range(30, 42))
    caches = [cache_of(form) for form in (kv_dtype, "auto")]
    coded, plain = (cache.stored(1) for cache in caches)
    generator = torch.Generator().manual_seed(8)
    for own, numbers in zip(coded, plain, strict=True):
        rows = torch.randn(prompt, 3, 12, generator=generator)
        places = torch.arange(prompt) // PAGE_TOKENS, torch.arange(prompt) % PAGE_TOKENS
        own.put(places, caches[0].format.encode(rows))
        numbers.codes.copy_(caches[0].format.decode(own))
    eviction = KvEviction(kept, tuple(map(PageId, targets)))
    placed = [PlacedSlice(0, replace(piece("long", 0, prompt, sources), eviction=eviction))]
    query = torch.randn(prompt, MODEL.num_heads, MODEL.head_dim, generator=generator)

    for cache in caches:
        PromptEvictor(MODEL, cache).around(NoAttention(), placed).attend(1, query)

    for own, numbers in zip(coded, plain, strict=True):
        found = caches[0].format.decode(own.at_pages(torch.tensor(targets)))
        assert torch.equal(found, numbers.codes[targets])
        assert found.flatten(0, 1)[:kept].any(dim=(1, 2)).all()
        assert not found.flatten(0, 1)[kept:].any()


def cache_of(kv_dtype: str) -> KvCache:
    """A cache in which every page is full of what nobody has written."""
    form = kv_format(kv_dtype, torch.float32)
    memory = DeviceMemory(42, bytes_per_page(MODEL, PAGE_TOKENS, torch.float32, form), torch.device("cpu"))
    memory.frames[:42] = 0x33
    return KvCache(MODEL, memory, PAGE_TOKENS, torch.float32, form)
