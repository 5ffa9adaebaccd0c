"""Tests of the list of all kernels that an engine may launch, on a machine without a GPU."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels extra is not installed")

from benchmarks.kernel_builds import ALL_MODELS, CODED_KV_MODELS, MODELS, QUANTISED_MODELS, STREAM_MODELS

from graftwork.engine.build.compile_kernels import CompilingAhead, ServedModel, served_variants
from graftwork.engine.core.prefix_keys import TokenHistory
from graftwork.engine.core.requests import AdapterUse
from graftwork.engine.core.sampling import RollingWindow, SamplingParams
from graftwork.engine.core.step import RequestSlice, SampleSpec, StepPlan
from graftwork.engine.core.tiers import PageId
from graftwork.engine.kernels.compile_ahead import CAPABILITIES, KernelVariant, compile_variant, is_cached, variant_of
from graftwork.engine.kernels.launch import Launch
from graftwork.engine.model.config import read_model_config
from graftwork.platform.ids import RequestId
from tests.engine.kernels.compiled import assert_fits, run_python
from tests.engine.random_models import make_base
from tests.engine.runner.device_gate import counted
from tests.engine.runner.llama_step import NUM_FRAMES, PAGE_TOKENS, LlamaRunner, adapter
from tests.engine.runner.test_dispatch_gate import FirstTokens

Variants = dict[Any, KernelVariant]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """The variants of all kernels that are launched in the test. Nothing is compiled."""
    found: Variants = {}

    def noted(launch: Launch) -> None:
        variant = variant_of(launch.kernel.__name__, launch)
        found.setdefault(variant.key, variant)

    monkeypatch.setattr(Launch, "run", noted)
    return found


def random_step(random: Random, *, awaits: bool) -> StepPlan:
    """Chunks of prompts, decoding rows and drafts, with adapters of any kind, mixtures, masks and rolling windows."""
    most = random.choice((1, 2, 6, 40))
    pieces = [random_piece(random, f"req_{number}", awaits=awaits) for number in range(random.randint(1, most))]
    return StepPlan(tuple(pieces))


def random_piece(random: Random, name: str, *, awaits: bool) -> RequestSlice:
    start = random.choice((0, 1, 15, 16, 500, 2047))
    kind = "decode" if awaits else random.choice(("decode", "drafts", "chunk", "last chunk"))
    num_tokens = {"decode": 1, "drafts": random.randint(2, 17)}.get(kind, random.choice((2, 40, 300)))
    num_samples = {"decode": 1, "drafts": num_tokens, "chunk": 0}.get(kind, 1)
    params = SamplingParams(max_tokens=64, temperature=random.choice((0.0, 0.8)), frequency_penalty=0.5)
    params = random.choice((params, SamplingParams(max_tokens=64, top_p=0.9, logprobs=2)))
    mask = random.choice((None, FirstTokens()))
    spec = SampleSpec(params, 1, start, mask=mask, history=TokenHistory([1, 2]))
    window = random.choice((None, None, RollingWindow(4, 100), RollingWindow(0, 2000)))
    num_given_up = 0 if window is None else random.choice((0, 400))
    start += num_given_up * PAGE_TOKENS
    num_pages = (start + num_tokens) // PAGE_TOKENS + 1 - num_given_up
    pages = tuple(PageId(random.randrange(NUM_FRAMES)) for _ in range(num_pages))
    single = [AdapterUse(digest) for digest in ("8", "16", "128", "columns", "columns alone")]
    mixture = (AdapterUse("8", 0.5), AdapterUse("128", 0.5))
    uses = random.choice([(), *((one,) for one in single), mixture])
    tokens = () if awaits else (7,) * num_tokens
    return RequestSlice(
        RequestId(name),
        tokens,
        start,
        pages,
        uses,
        (spec,) * num_samples,
        awaits_token=awaits,
        rolling_window=window,
        num_given_up=num_given_up,
    )


def runner_of(model: ServedModel) -> LlamaRunner:
    config, dtype = model.config, model.dtype
    adapters = [adapter(str(rank), rank, config, dtype) for rank in (8, 16, 128)]
    adapters.append(adapter("columns", 16, config, dtype, has_columns=True))
    adapters.append(adapter("columns alone", 0, config, dtype, has_columns=True))
    return LlamaRunner(adapters, config, dtype, rounds_rows=model.rounds_rows, kv_dtype=model.kv_dtype)


ROUTED = ("qwen3-30b-a3b bf16", "gpt-oss-20b mxfp4", "qwen3-30b-a3b awq", "qwen3-30b-a3b fp8 rows")


@pytest.mark.parametrize("name", [*MODELS, *STREAM_MODELS, *QUANTISED_MODELS, *CODED_KV_MODELS, *ROUTED])
def test_no_step_launches_a_kernel_that_is_not_listed(name: str, launched: Variants) -> None:
    """Random steps of prefill, decoding and drafts, and all CUDA graphs, launch only variants that are listed for their
    model, and each kernel that is listed."""
    model = ALL_MODELS[name]
    listed = {variant.key: variant for variant in served_variants(model)}
    made, random = runner_of(model), Random(14)

    for number in range(80):
        with counted(made.pinned):
            made.runner.launch(random_step(random, awaits=False)).sample()
            if number % 8 == 0:
                first = StepPlan(tuple(random_piece(random, "req_0", awaits=False) for _ in range(1)))
                made.runner.launch(first).sample()
                made.runner.launch(StepPlan((random_piece(random, "req_0", awaits=True),))).sample()
    for key in made.keys:
        with counted(made.pinned):
            made.graphs.work_of(key)()
    made.masks.close()

    missing = [launched[key] for key in launched.keys() - listed.keys()]
    assert not missing, [(one.name, one.constants, one.options, one.aligned) for one in missing]
    experts = model.config.experts
    by_torch = set() if experts is None or experts.clamped is None else {"activate_kernel"}
    names = [{one.kernel.__name__ for one in variants.values()} for variants in (launched, listed)]
    assert names[0] == names[1] - by_torch
    assert len(launched) >= len(listed) / 2


def test_the_name_of_a_kernel_in_the_cache_is_its_own() -> None:
    """Triton's names of kernels do not depend on the kernels that were named before, as it is with a function that
    several kernels call and that reads a global constant. Another process would compile such a kernel again."""
    script = (
        "import sys; from benchmarks.kernel_builds import ALL_MODELS\n"
        "from graftwork.engine.build.compile_kernels import served_variants\n"
        "found = {one.kernel.__name__: one.kernel for model in ALL_MODELS.values() for one in served_variants(model)}\n"
        "names = sorted(found, reverse=sys.argv[1] == 'backwards')\n"
        "keys = {name: found[name].cache_key for name in names}\n"
        "print(*sorted(keys.items()), sep='\\n')"
    )

    forwards, backwards = (run_python("-c", script, order) for order in ("forwards", "backwards"))

    assert forwards.returncode == backwards.returncode == 0, forwards.stderr + backwards.stderr
    assert len(forwards.stdout.splitlines()) > 15
    assert forwards.stdout == backwards.stdout


def test_sizes_that_no_kernel_serves_do_not_stop_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model for which torch stands in is not compiled for, and the log says why."""
    model = MODELS["llama-8b bf16"]
    wide = replace(model, config=replace(model.config, num_heads=1024, num_kv_heads=1))

    CompilingAhead(tmp_path, wide, 90).wait()

    assert [record.getMessage() for record in caplog.records] == ["kernels_not_compiled_ahead"]
    assert "1024 query heads share one KV head" in caplog.records[0].reason  # type: ignore[attr-defined]


def test_a_start_that_fails_ends_what_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes that are told to stop end by SIGTERM, long before all kernels are compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = make_base(tmp_path / "base")
    model = ServedModel(read_model_config(folder), torch.bfloat16, page_tokens=8, max_lora_rank=16)
    compiling = CompilingAhead(folder, model, 90)

    compiling.stop()
    compiling.wait()

    assert [record.getMessage() for record in caplog.records] == ["kernels_not_compiled_ahead"]
    assert caplog.records[0].reason == "exit status -15"  # type: ignore[attr-defined]
    assert not all(is_cached(variant, 90) for variant in served_variants(model))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_start_compiles_what_the_cache_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After the first start on a machine every kernel of the model is in Triton's cache, and the second compiles none."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # the processes inherit it
    folder = make_base(tmp_path / "base")
    model = ServedModel(read_model_config(folder), torch.bfloat16, page_tokens=8, max_lora_rank=16)
    caplog.set_level("INFO")

    for _ in range(2):
        CompilingAhead(folder, model, 90).wait()

    assert all(is_cached(variant, 90) for variant in served_variants(model))
    assert not is_cached(served_variants(model)[0], 80)
    assert [record.getMessage() for record in caplog.records] == ["kernels_compiled"]
    assert caplog.records[0].kernels == len(served_variants(model))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", MODELS)
def test_all_kernels_of_an_engine_compile_and_fit(name: str, capability: int) -> None:
    """Every variant that an engine may launch compiles for the architecture and fits its shared memory. Nothing spills
    but prefill: of a thread, attention in 16 bits at most 64 bytes on Ampere and with a rolling window 16 on Blackwell, and tiles
    of LoRA in fp32 8 on Blackwell."""
    is_fp32 = MODELS[name].dtype == torch.float32
    on_ampere = 64 if capability == 80 and not is_fp32 else 0
    allowed = {
        "attend_tiles_kernel": on_ampere,
        "attend_rolling_tiles_kernel": 16 if capability == 100 and not is_fp32 else on_ampere,
        "shrink_tiles_kernel": 8 if capability == 100 and is_fp32 else 0,
    }
    for variant in served_variants(MODELS[name]):
        assert_fits(compile_variant(variant, capability), spilled_bytes=allowed.get(variant.kernel.__name__, 0))
