# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Applies grammar masks to logits: sets the logits of forbidden tokens to -inf, in place.

A mask has one bit for each token, 32 tokens to an int32 word; bit i of word w is token 32 * w + i, and 1 allows it.
This is the form of xgrammar and llguidance. So a mask of 128,000 tokens is 16 KB, and is not expanded in memory. The
logits of allowed tokens are neither read nor written.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.launch import Launch

_BLOCK_WORDS = 128
"""The words of one program: 4,096 tokens."""


@triton.jit(do_not_specialize=["num_words"])
def token_mask_kernel(
    logits,
    words,
    mask_rows,
    num_masks,
    logits_stride,
    words_stride,
    num_words,
    VOCAB: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Applies one block of words of one mask. Does nothing if the mask is not one of the first `num_masks`."""
    mask_number = tl.program_id(0)
    if mask_number >= tl.load(num_masks):
        return
    row = tl.load(mask_rows + mask_number).to(tl.int64)
    word_ids = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    block = tl.load(words + mask_number.to(tl.int64) * words_stride + word_ids, mask=word_ids < num_words, other=-1)
    bits = tl.arange(0, 32)
    is_barred = ((block[:, None] >> bits[None, :]) & 1) == 0  # [BLOCK_WORDS, 32]
    tokens = word_ids[:, None] * 32 + bits[None, :]
    never = tl.full((BLOCK_WORDS, 32), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + tokens, never, mask=is_barred & (tokens < VOCAB))


def token_mask_launch(
    logits: torch.Tensor, words: torch.Tensor, mask_rows: torch.Tensor, num_masks: torch.Tensor
) -> Launch:
    """Returns the launch that applies the first `num_masks` masks to the logits, in place.

    logits: [num_rows, vocab] floating point, with any stride between rows; words: int32 [max_masks, vocab / 32, rounded
    up]; mask_rows: int32 or int64 [max_masks], the row of the logits that each mask is for; num_masks: int32 or int64
    [1], on the device, so that the launch is the same for any number of masks. Bits beyond the vocabulary and masks
    beyond `num_masks` are ignored. Raises ValueError if the shapes do not fit.
    """
    max_masks, num_words = words.shape
    if num_words != -(-logits.shape[1] // 32) or len(mask_rows) != max_masks or words.dtype != torch.int32:
        raise ValueError(
            f"masks must be int32 [max_masks, {-(-logits.shape[1] // 32)}], with one row number each; "
            f"got {words.dtype} {tuple(words.shape)} and {len(mask_rows)} row numbers"
        )
    if logits.stride(1) != 1 or words.stride(1) != 1:
        raise ValueError("the logits of a row and the words of a mask must be adjacent in memory")
    arguments: dict[str, Any] = {
        "logits": logits,
        "words": words,
        "mask_rows": mask_rows,
        "num_masks": num_masks,
        "logits_stride": logits.stride(0),
        "words_stride": words.stride(0),
        "num_words": num_words,
        "VOCAB": logits.shape[1],
        "BLOCK_WORDS": _BLOCK_WORDS,
    }
    grid = (max_masks, triton.cdiv(num_words, _BLOCK_WORDS))
    return Launch(token_mask_kernel, grid, arguments, {"num_warps": 4, "num_stages": 1})
