"""What an engine takes of a device's memory: never more than its share, and each refusal names numbers that then start."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engine.build.device_sizes import FrameSizer, MeasuredDevice
from graftwork.engine.core.prefix_keys import pages_for
from graftwork.engine.kv.index.kv_sizes import KvSizes
from graftwork.engine.kv.transfer.device_memory import EXTRA_FRAMES
from graftwork.platform.errors import InvalidRequest

GIB = 2**30
LLAMA_8B = FrameSizer(
    KvSizes(16, 2 * 2**20, 0, 512, 8192, reserve_share=0.5, lora_floor_share=0.125), 131_072, 8 * 5120 * 2
)
"""Llama-3.1-8B in bf16: a page of 16 tokens takes 2 * 32 layers * 16 * 1024 * 2 bytes."""


@st.composite
def sizers(draw: st.DrawFn) -> FrameSizer:
    page_tokens, context_tokens = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 5000))
    shares = draw(st.sampled_from([0.0, 0.1, 0.125, 0.5, 0.9])), draw(st.sampled_from([0.0, 0.125, 0.5, 1.0]))
    page_bytes = draw(st.integers(1, 10_000))
    sizes = KvSizes(page_tokens, page_bytes, 0, 0, pages_for(context_tokens, page_tokens), *shares)
    return FrameSizer(sizes, context_tokens, draw(st.integers(1, 50_000)))


devices = st.builds(
    MeasuredDevice,
    st.just("cuda:0"),
    free_bytes=st.integers(0, 10**8),
    step_bytes=st.integers(0, 10**6),
    copies_bytes=st.integers(0, 10**6),
    graphs_bytes=st.integers(0, 10**6),
)
shares = st.floats(0.01, 1)


def served(sizer: FrameSizer, sizes: KvSizes) -> bool:
    """Whether these sizes hold one context and, beside it, the smallest adapter."""
    return sizes.max_lora_pages * sizer.frame_bytes >= sizer.adapter_bytes and sizes.device_pages > sizes.context_pages


def shorter(sizer: FrameSizer, context_tokens: int) -> FrameSizer:
    """The sizer of an engine that was started with this `max_context_tokens`."""
    context_pages = pages_for(context_tokens, sizer.wanted.page_tokens)
    return replace(sizer, wanted=replace(sizer.wanted, context_pages=context_pages), context_tokens=context_tokens)


def number(pattern: str, message: str) -> float | None:
    found = re.search(pattern, message)
    return None if found is None else float(found[1].rstrip("."))


@given(sizers(), devices, shares)
def test_steps_copies_and_frames_stay_within_the_share_of_free_memory(
    sizer: FrameSizer, device: MeasuredDevice, share: float
) -> None:
    """What the engine allocates beside the weights is at most the share of what was free, and it can serve."""
    try:
        sizes = sizer.measured(device, share)
    except InvalidRequest:
        return

    frames = (sizes.device_pages + EXTRA_FRAMES) * sizer.frame_bytes
    assert frames + device.step_bytes + device.copies_bytes <= device.free_bytes * share
    assert frames + device.step_bytes + device.copies_bytes + device.graphs_bytes <= device.free_bytes
    assert served(sizer, sizes)


@given(sizers(), devices, shares, st.integers(0, 10**7))
def test_a_bigger_device_never_gives_fewer_pages(
    sizer: FrameSizer, device: MeasuredDevice, share: float, more: int
) -> None:
    """More free memory never refuses what less could serve, and never makes the cache smaller."""
    try:
        sizes = sizer.measured(device, share)
    except InvalidRequest:
        return

    bigger = sizer.measured(replace(device, free_bytes=device.free_bytes + more), share)

    assert bigger.device_pages >= sizes.device_pages
    assert bigger.max_lora_pages >= sizes.max_lora_pages


@given(sizers(), devices, shares)
def test_each_number_in_a_refusal_of_the_measured_memory_starts(
    sizer: FrameSizer, device: MeasuredDevice, share: float
) -> None:
    """The context, the share and the free bytes that the error names are each enough, and a longer context is not."""
    try:
        sizer.measured(device, share)
        return
    except InvalidRequest as error:
        message = error.message

    context = number(r"--max-context-tokens of at most (\d+)", message)
    least_share = number(r"--memory-share of at least ([\d.]+)", message)
    free_bytes = number(r"a device with (\d+) bytes free", message)
    assert (least_share is None) != (free_bytes is None)
    if context is not None:
        assert served(sizer, shorter(sizer, int(context)).measured(device, share))
        with pytest.raises(InvalidRequest):
            shorter(sizer, int(context) + 1).measured(device, share)
    if least_share is not None:
        assert served(sizer, sizer.measured(device, least_share))
    if free_bytes is not None:
        assert served(sizer, sizer.measured(replace(device, free_bytes=int(free_bytes)), share))


@given(sizers(), devices, st.integers(0, 10**8))
def test_each_number_in_a_refusal_of_given_bytes_starts(
    sizer: FrameSizer, device: MeasuredDevice, device_bytes: int
) -> None:
    """Too few bytes name enough bytes and a context that fits; too many name the most that the device has."""
    try:
        sizes = sizer.given_on(device, device_bytes)
        assert served(sizer, sizes)
        assert sizes.device_pages == device_bytes // sizer.frame_bytes
        return
    except InvalidRequest as error:
        message = error.message

    if least := number(r"--device-bytes of at least (\d+)", message):
        assert served(sizer, sizer.given(int(least)))
        with pytest.raises(InvalidRequest):
            sizer.given(int(least) - 1)
    if context := number(r"--device-bytes \d+ is too little.*--max-context-tokens of at most (\d+)", message):
        assert served(sizer, shorter(sizer, int(context)).given(device_bytes))
    if most := number(r"--device-bytes of at most (\d+)", message):
        assert served(sizer, sizer.given_on(device, int(most)))


@pytest.mark.parametrize("given", [True, False])
def test_reserves_that_leave_adapters_nothing_are_refused_as_such(given: bool) -> None:
    """If KV reserves the whole device and adapters nothing, the error names the two shares, and no size or context. Either
    of the changes that it proposes starts."""
    device = MeasuredDevice("cuda:0", free_bytes=63 * GIB, step_bytes=2 * GIB, copies_bytes=GIB // 4)
    wanted = replace(LLAMA_8B.wanted, reserve_share=1.0, lora_floor_share=0.0)

    sizer = replace(LLAMA_8B, wanted=wanted)

    with pytest.raises(InvalidRequest) as refusal:
        sizer.given(40 * GIB) if given else sizer.measured(device, 0.9)

    assert refusal.value.param == "kv_reserve_share"
    assert "smaller kv_reserve_share (0.5 is the default), or lora_floor_share above 0" in refusal.value.message
    assert not re.search(r"bytes|--max-context", refusal.value.message)
    for mended in (replace(wanted, reserve_share=0.5), replace(wanted, lora_floor_share=0.01)):
        assert served(LLAMA_8B, replace(LLAMA_8B, wanted=mended).measured(device, 0.9))


def test_llama_8b_starts_on_80_gb_with_its_whole_context() -> None:
    """Beside 16 GB of weights, 57 GiB of an H100 hold a context of 131,072 tokens and three times as much."""
    device = MeasuredDevice("cuda:0", free_bytes=63 * GIB, step_bytes=2 * GIB, copies_bytes=GIB // 4)

    sizes = LLAMA_8B.measured(device, 0.9)

    assert sizes.device_pages == (int(63 * GIB * 0.9) - 2 * GIB - GIB // 4) // (2 * 2**20) - EXTRA_FRAMES
    assert sizes.device_pages > 3 * sizes.context_pages


def test_llama_8b_on_24_gb_is_told_the_context_that_fits() -> None:
    """On a device with 7 GiB beside the weights, the error names a context of some thousand tokens."""
    device = MeasuredDevice("cuda:0", free_bytes=7 * GIB, step_bytes=GIB, copies_bytes=GIB // 4)

    with pytest.raises(InvalidRequest, match=r"--max-context-tokens of at most 4\d{4}\. Or take a device"):
        LLAMA_8B.measured(device, 0.9)
