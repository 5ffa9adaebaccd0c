"""Keys and values in bytes are the nearest codes, and follow from their own token and head alone."""

import pytest
import torch

from graftwork.engine.kv.transfer.kv_format import kv_format
from graftwork.platform.errors import InvalidRequest

NAMES = ["int8", "fp8"]


def brute_force(head: torch.Tensor, name: str) -> torch.Tensor:
    """Returns one head of one token after a round trip, computed value by value in fp64."""
    most = {"int8": 127.0, "fp8": 448.0}[name]
    scale = float((head.float().abs().max() / most).to(torch.bfloat16))
    if name == "int8":
        codes = [max(-127.0, min(127.0, float(round(value / scale)))) for value in head.tolist()]
    else:
        grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        grid = torch.cat([-grid, grid])
        codes = [float(grid[(grid - value / scale).abs().argmin()]) for value in head.tolist()]
    return torch.tensor([code * scale for code in codes], dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest(name: str, dtype: torch.dtype) -> None:
    """A head comes back as the nearest codes times its scale, rounded once."""
    form = kv_format(name, dtype)
    rows = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)

    back = form.decode(form.encode(rows))

    expected = torch.stack([torch.stack([brute_force(head, name) for head in row]) for row in rows])
    assert back.dtype == dtype
    close = 2e-7 if dtype == torch.float32 else 2.0**-8
    error, least = (back.double() - rows.double()).abs(), (expected - rows.double()).abs()  # two codes may be as near
    assert (error <= least + close * expected.abs()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_large_and_small_heads_keep_their_size(name: str, size: float) -> None:
    """Heads of any size, beside heads of zeros, come back within half a step of their own scale."""
    form = kv_format(name, torch.float32)
    rows = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1)) * size
    rows[:, 1] = 0.0

    back = form.decode(form.encode(rows))

    largest = rows.abs().amax(dim=2, keepdim=True)
    assert ((back - rows).abs() <= largest / {"int8": 200, "fp8": 15}[name]).all()
    assert not back[:, 1].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_token_is_stored_alike_beside_any_other(name: str) -> None:
    """A token has the same bytes alone and beside others."""
    form = kv_format(name, torch.bfloat16)
    rows = torch.randn(9, 2, 24, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)

    together = form.encode(rows)

    alone = [form.encode(rows[row : row + 1]) for row in range(9)]
    for part, parts in zip(together.parts, zip(*(one.parts for one in alone), strict=True), strict=True):
        assert torch.equal(part, torch.cat(parts))
    assert [part.shape for part in together.parts] == [(9, 2, 24), (9, 2)]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_zeros_are_zeros(name: str) -> None:
    """A page that was zeroed reads as zeros."""
    form = kv_format(name, torch.float32)
    pages = torch.full((2, 4, 3, form.width(8)), 255, dtype=torch.uint8)
    stored = form.of_pages(pages)

    stored.zero(torch.tensor([1]))

    assert not pages[1].any()
    assert torch.equal(form.decode(stored.at_pages(torch.tensor([1]))), torch.zeros(1, 4, 3, 8))
    assert (pages[0] == 255).all()


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_a_page_come_before_its_scales(name: str) -> None:
    """Codes and scales cover each byte of a page once: the codes of all tokens, and then the scales by head."""
    form = kv_format(name, torch.bfloat16)
    pages = torch.zeros(2, 4, 3, form.width(8), dtype=torch.uint8)
    stored = form.of_pages(pages)
    rows = form.encode(torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16))

    stored.put((torch.tensor([1, 1, 1, 1, 0]), torch.tensor([0, 1, 2, 3, 2])), rows)

    assert rows.scales is not None
    codes, scales = rows.codes.flatten(1), rows.scales.view(torch.uint8).view(5, 3, 2)
    assert torch.equal(pages[1].flatten()[:96], codes[:4].flatten())
    assert torch.equal(pages[1].flatten()[96:], scales[:4].transpose(0, 1).flatten())
    assert torch.equal(pages[0].flatten()[48:72], codes[4])


def test_auto_stores_what_it_gets() -> None:
    """Without a choice, keys and values are stored in the model's dtype."""
    form, rows = kv_format("auto", torch.bfloat16), torch.randn(2, 8).to(torch.bfloat16)

    assert form.encode(rows).parts == (rows,)
    assert form.decode(form.encode(rows)) is rows
    assert (form.storage_dtype, form.width(8), form.name) == (torch.bfloat16, 8, "")


def test_other_names_are_refused() -> None:
    """A name that is no format is refused."""
    with pytest.raises(InvalidRequest, match="kv_dtype 'int4' is not served: give auto, int8 or fp8"):
        kv_format("int4", torch.float32)
