"""What the bits of a row depend on in this machine's matrix products: the ground under engine/model/batch_invariance.py.

    python benchmarks/row_bits.py

Prints, for fp32 and bf16, the sizes at which a row's bits differ from those it has in a large product. The engine's
rules are sound on this machine if it pads or divides every size named here, and no sum depends on zeros; exits with 1
otherwise.
"""

import sys
from collections.abc import Iterator

import torch
from torch.nn import functional

from graftwork.engine.lora.packs import WINDOW_RANKS
from graftwork.engine.lora.resident_adapter import RANK_PAGE
from graftwork.engine.model.batch_invariance import BatchInvariance

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 31, 32, 33, 64, 100, 256, 512)
COLUMNS = (8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1000)
QUERIES = 17
FEATURES = (128, 480, 512, 1408)
OUTPUTS = (96, 256, 1024)


def random_matrix(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def cancelling(
    generator: torch.Generator, dtype: torch.dtype, rows: int, outputs: int, features: int
) -> list[torch.Tensor]:
    """x and a weight whose products sum to 0 but for rounding, so that each order of the sum leaves another rest."""
    x, weight = (random_matrix(generator, torch.float32, size, features // 2) for size in (rows, outputs))
    places = torch.randperm(features, generator=generator)
    return [torch.cat(halves, dim=1)[:, places].to(dtype) for halves in ([x, x], [weight, -weight])]


def rows_that_matter(dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """(Rows, features) at which x @ W.T differs from the same rows of a product of 32; the first 32 of a larger one."""
    generator = torch.Generator().manual_seed(0)
    for features in FEATURES:
        for outputs in OUTPUTS:
            x, weight = cancelling(generator, dtype, max(ROWS), outputs, features)
            shared = functional.linear(x[:32], weight)
            for rows in ROWS:
                if not torch.equal(functional.linear(x[:rows], weight)[:32], shared[:rows]):
                    yield rows, features


def columns_that_matter(dtype: torch.dtype, rows: int) -> Iterator[int]:
    """Numbers of columns at which x @ A differs from the same columns of a product of 1,024."""
    generator = torch.Generator().manual_seed(1)
    for features in FEATURES:
        x, matrix = random_matrix(generator, dtype, rows, features), random_matrix(generator, dtype, features, 1024)
        whole = torch.mm(x, matrix)
        for columns in COLUMNS:
            if not torch.equal(torch.mm(x, matrix[:, 8 : 8 + columns].contiguous()), whole[:, 8 : 8 + columns]):
                yield columns


def zeros_that_matter(dtype: torch.dtype, rows: int) -> Iterator[int]:
    """Lengths of a sum at which 16 ranks among zeros, at some multiple of a page, differ from the 16 alone."""
    generator = torch.Generator().manual_seed(2)
    v, B = random_matrix(generator, dtype, rows, 16), random_matrix(generator, dtype, 16, 512)
    y = random_matrix(generator, dtype, rows, 512)
    alone = y.clone().addmm_(v, B)
    for length in range(16, WINDOW_RANKS + 1, RANK_PAGE):
        for first in range(0, length - 15, RANK_PAGE):
            padded_v, padded_B = v.new_zeros(rows, length), random_matrix(generator, dtype, length, 512)
            padded_v[:, first : first + 16], padded_B[first : first + 16] = v, B
            blocks = y.clone().view(1, rows, 512).baddbmm_(padded_v.unsqueeze(0), padded_B.unsqueeze(0))
            if not torch.equal(y.clone().addmm_(padded_v, padded_B), alone) or not torch.equal(blocks[0], alone):
                yield length


def decoding_that_matters(dtype: torch.dtype, *, as_chunk: bool) -> Iterator[int]:
    """Lengths at which a query beside others over one sequence's keys differs from the query alone.

    The others are as many sequences that share one table, as drafts are verified, or the further queries of a chunk.
    """
    generator = torch.Generator().manual_seed(3)
    for keys in (32, 64, 128, 256, 608, 1024):
        query = random_matrix(generator, dtype, QUERIES, 2, 2, 32)  # [queries, kv_heads, group, head_dim]
        key, value = (random_matrix(generator, dtype, 1, 2, keys, 32) for _ in range(2))
        visible = torch.arange(keys) <= torch.arange(keys - QUERIES - 3, keys - 3)[:, None]  # [queries, keys]
        alone = [
            functional.scaled_dot_product_attention(query[row : row + 1], key, value, attn_mask=visible[row : row + 1])
            for row in range(QUERIES)
        ]
        if as_chunk:
            rows = query.transpose(0, 1).reshape(1, 2, QUERIES * 2, 32)
            mask = visible.repeat_interleave(2, dim=0)
            mixed = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
            mixed = mixed.view(2, QUERIES, 2, 32).transpose(0, 1)
        else:
            shared = (key.expand(QUERIES, -1, -1, -1), value.expand(QUERIES, -1, -1, -1))
            mixed = functional.scaled_dot_product_attention(query, *shared, attn_mask=visible[:, None, None])
        if not torch.equal(mixed, torch.cat(alone)):
            yield keys


def main() -> int:
    torch.set_num_threads(1)
    is_sound = True
    for dtype in (torch.float32, torch.bfloat16):
        rules = BatchInvariance.of(dtype)
        differing = set(rows_that_matter(dtype))
        rows = sorted({rows for rows, _ in differing})
        columns = sorted(set(columns_that_matter(dtype, max(8, rules.min_rows))))
        zeros = sorted(set(zeros_that_matter(dtype, max(8, rules.min_rows))))
        print(f"{dtype!s:<16}rows {show(rows)}; columns {show(columns)}; zeros in a sum {show(zeros)}")
        is_sound &= all(rules.rows(size) != size or is_divided(rules, size, features) for size, features in differing)
        is_sound &= max(columns, default=0) < rules.min_columns
        is_sound &= not zeros
        shared = list(decoding_that_matters(dtype, as_chunk=False))
        print(f"{'':<16}queries that share a table {show(shared)}; as a chunk {show_chunk(dtype)}")
        is_sound &= not shared
    print("The engine's rules hold on this machine." if is_sound else "The engine's rules do NOT hold on this machine.")
    return 0 if is_sound else 1


def is_divided(rules: BatchInvariance, rows: int, features: int) -> bool:
    most = rules.rows_at_once(features)
    return most is not None and rows > most


def show_chunk(dtype: torch.dtype) -> str:
    """Why drafts decode: nothing relies on this one."""
    return show(list(decoding_that_matters(dtype, as_chunk=True)))


def show(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) if sizes else "none"


if __name__ == "__main__":
    sys.exit(main())
