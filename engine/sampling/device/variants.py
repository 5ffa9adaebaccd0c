"""Lists the variants of the sampling kernels that are compiled ahead (see engine/kernels/compile_ahead.py).

What decides a variant, besides the dtype of the logits, is whether the vocabulary is a multiple of 16.
"""

from collections.abc import Iterator

import torch

from graftwork.engine.kernels.compile_ahead import KernelVariant, variant_of
from graftwork.engine.sampling.device.launches import SamplerMemory, SamplerSizes

VOCABULARIES = ((128_256, torch.bfloat16), (128_256, torch.float16), (128_256, torch.float32), (50_257, torch.bfloat16))
"""The vocabularies (Llama 3, GPT-2) and dtypes of logits that are compiled."""
_ROWS = 32


def sampler_variants() -> Iterator[KernelVariant]:
    """Yields the variants of the four kernels. Those that do not read the logits are listed once a vocabulary."""
    seen = set()
    for vocab_size, dtype in VOCABULARIES:
        for variant in served_sampler_variants(vocab_size, dtype):
            if variant.key not in seen:
                seen.add(variant.key)
                yield variant


def served_sampler_variants(vocab_size: int, dtype: torch.dtype) -> Iterator[KernelVariant]:
    """Yields what an engine launches whose logits have this dtype. It does not depend on the number of rows."""
    memory = SamplerMemory(_ROWS, vocab_size, torch.device("meta"), SamplerSizes())
    logits = torch.empty(_ROWS, vocab_size, dtype=dtype, device="meta")
    counts = torch.empty(_ROWS, vocab_size, dtype=torch.int16, device="meta")
    parameters = torch.empty(2 * memory.columns.lists_at, dtype=torch.int32, device="meta")
    for launch in memory.launches(logits, counts, parameters, None):
        yield variant_of(f"{vocab_size} {str(dtype).removeprefix('torch.')}", launch)
