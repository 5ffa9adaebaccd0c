"""Compiles all Triton kernels that an engine may launch, for several GPU architectures, on a machine without a GPU.

Prints a table: for each variant and architecture the registers, the spilled bytes, and the sizes of shared memory and
machine code. See engine/kernels/compile_ahead.py.

    python -m graftwork.engine.build.compile_kernels

Each room with kernels lists its variants, and `all_variants` joins the lists.
"""

import sys
from collections.abc import Iterator

from graftwork.engine.attention.variants import attention_variants
from graftwork.engine.kernels.compile_ahead import HEADING, KernelVariant, compile_all, line_of
from graftwork.engine.kernels.variants import row_variants
from graftwork.engine.lora.triton.variants import lora_variants
from graftwork.engine.sampling.device.variants import sampler_variants


def all_variants() -> Iterator[KernelVariant]:
    """Yields the variants of all kernels of the engine."""
    yield from row_variants()
    yield from lora_variants()
    yield from attention_variants()
    yield from sampler_variants()


def main() -> None:
    """Compiles every variant for every architecture, and prints one line about each."""
    sys.stdout.write(HEADING + "\n")
    for built in compile_all(all_variants()):
        sys.stdout.write(line_of(built) + "\n")


if __name__ == "__main__":
    main()
