"""Tests of the kernel that applies grammar masks, under the interpreter."""

from random import Random
from types import ModuleType

import numpy as np
import pytest
import torch

NEVER = float("-inf")


def words_of(allowed: list[list[int]], vocab: int) -> torch.Tensor:
    """The masks that allow the given tokens. Bits beyond the vocabulary are not set.  # int32 [masks, words]"""
    num_words = -(-vocab // 32)
    bits = np.zeros((len(allowed), 32 * num_words), dtype=np.bool_)
    for row, tokens in enumerate(allowed):
        bits[row, tokens] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 32, 33, 97, 4096, 4100])
def test_only_allowed_tokens_keep_their_logits(
    interpreted: dict[str, ModuleType], generator: torch.Generator, vocab: int, dtype: torch.dtype
) -> None:
    """A masked row keeps the logits of its allowed tokens, bit by bit; all others are -inf; other rows are untouched."""
    random = Random(vocab)
    allowed = [random.sample(range(vocab), random.randint(0, vocab)) for _ in range(3)]
    logits = torch.randn(6, vocab + 3, generator=generator).to(dtype)
    expected, rows = logits.clone(), [4, 0, 3]
    for row, tokens in zip(rows, allowed, strict=True):
        barred = torch.ones(vocab, dtype=torch.bool)
        barred[tokens] = False
        expected[row, :vocab].masked_fill_(barred, NEVER)

    interpreted["token_mask"].token_mask_launch(
        logits[:, :vocab], words_of(allowed, vocab), torch.tensor(rows, dtype=torch.int32), torch.tensor([3])
    ).run()

    assert torch.equal(logits, expected)


def test_masks_beyond_the_live_ones_are_ignored(interpreted: dict[str, ModuleType]) -> None:
    """The launch covers the capacity, but only the first masks are applied, as many as the device's count says."""
    logits = torch.zeros(2, 40)
    words = words_of([[3], [], []], 40)

    interpreted["token_mask"].token_mask_launch(
        logits, words, torch.tensor([1, 0, 10**6]), torch.tensor([1], dtype=torch.int32)
    ).run()

    assert logits[0].eq(0).all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3]


def test_masks_of_another_vocabulary_are_refused(interpreted: dict[str, ModuleType]) -> None:
    """Masks with too few words, a wrong dtype or no row number each are refused before the launch."""
    launch = interpreted["token_mask"].token_mask_launch
    logits, count = torch.zeros(2, 40), torch.tensor([1])
    rows = torch.tensor([0])

    for words, own_rows in (
        (torch.zeros(1, 1, dtype=torch.int32), rows),
        (torch.zeros(1, 2, dtype=torch.int64), rows),
        (torch.zeros(2, 2, dtype=torch.int32), rows),
    ):
        with pytest.raises(ValueError, match="masks must be"):
            launch(logits, words, own_rows, count)
    with pytest.raises(ValueError, match="adjacent"):
        launch(logits.t().contiguous().t(), torch.zeros(1, 2, dtype=torch.int32), rows, count)
