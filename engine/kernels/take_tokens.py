# The bodies of kernels are Triton's language, which mypy cannot see into.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Fills in the tokens that a step takes from the step before, on the device.

With overlap, a step is launched before the host knows the tokens of the step before. They are on the device already.
"""

import torch
import triton
import triton.language as tl

from graftwork.engine.kernels.launch import Launch

_BLOCK = 128


@triton.jit(do_not_specialize=["num_rows"])
def take_tokens_kernel(token_ids, sources, sampled, num_rows, BLOCK: tl.constexpr):
    """Writes sampled[sources[row]] to token_ids[row] for the rows whose source is not negative."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + rows, mask=rows < num_rows, other=-1)
    tokens = tl.load(sampled + source, mask=source >= 0, other=0)
    tl.store(token_ids + rows, tokens.to(token_ids.dtype.element_ty), mask=source >= 0)


def take_tokens_launch(token_ids: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor) -> Launch:
    """Returns the launch that fills in tokens, in place.

    token_ids, sources: [num_rows]; sampled: [any number]. All are integers. A negative source keeps the row's token.
    """
    arguments = {
        "token_ids": token_ids,
        "sources": sources,
        "sampled": sampled,
        "num_rows": len(token_ids),
        "BLOCK": _BLOCK,
    }
    return Launch(
        take_tokens_kernel, (triton.cdiv(len(token_ids), _BLOCK),), arguments, {"num_warps": 4, "num_stages": 1}
    )
