"""How near the LoRA kernels come to the floor that memory sets, on the layers of Llama-3.1-8B in bf16.

    python benchmarks/lora_kernels.py

The floor of one fused layer is its bytes over the bandwidth that a large copy reaches on this device: the weights of
each distinct adapter once, x read once, y read and written once. Times are medians over graph replays with a cold L2.
The base column is the layer's own GEMM, measured alike; the last says what the adapters add to it.
"""

from dataclasses import dataclass

import torch

from graftwork.engine.kernels.lora_segments import build_segments
from graftwork.engine.kernels.random_adapters import random_slots
from graftwork.engine.kernels.slice_table import build_table

DTYPE = torch.bfloat16
LAYERS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
BATCHES = ((1, 1), (32, 1), (32, 32), (256, 64), (2048, 4), (8192, 8))
"""(rows, distinct adapters)."""
RANKS = (16, 64)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One layer in one step."""

    layer: str
    num_rows: int
    num_adapters: int
    rank: int
    lora_s: float
    base_s: float
    floor_s: float

    def line(self) -> str:
        return (
            f"{self.layer:<8} {self.num_rows:>5} {self.num_adapters:>8} {self.rank:>4} {self.lora_s * 1e6:>8.1f} "
            f"{self.floor_s * 1e6:>8.1f} {self.floor_s / self.lora_s:>6.0%} {self.base_s * 1e6:>8.1f} "
            f"{self.lora_s / self.base_s:>6.0%}"
        )


def copy_bandwidth() -> float:
    """Bytes a second that a 4 GiB copy moves, reads and writes together."""
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    milliseconds = do_bench(lambda: target.copy_(source), return_mode="median")
    return float(2 * source.nbytes / (milliseconds * 1e-3))


def measure(layer: str, num_rows: int, num_adapters: int, rank: int, bandwidth: float) -> Measurement:
    from triton.testing import do_bench

    from graftwork.engine.kernels.lora_matmul import apply_lora

    in_features, widths = LAYERS[layer]
    generator = torch.Generator().manual_seed(0)
    one_adapter = random_slots([[rank] * len(widths)], in_features, widths, DTYPE, generator)[0]
    slots = [
        [type(pair)(pair.A.cuda(), pair.B.t().contiguous().cuda().t(), pair.scale) for pair in one_adapter if pair]
        for _ in range(num_adapters)
    ]
    table = build_table(slots, widths, in_features, DTYPE, "cuda")
    segments = build_segments([row * num_adapters // num_rows for row in range(num_rows)], "cuda")
    x = torch.randn(num_rows, in_features, device="cuda").to(DTYPE)
    y = torch.randn(num_rows, sum(widths), device="cuda").to(DTYPE)
    weight = torch.randn(sum(widths), in_features, device="cuda").to(DTYPE)
    apply_lora(x, y, table, segments)  # compiles
    torch.mm(x, weight.t())
    lora_graph, base_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(lora_graph):
        apply_lora(x, y, table, segments)
    with torch.cuda.graph(base_graph):
        torch.mm(x, weight.t(), out=y)
    weight_bytes = sum(matrix.nbytes for matrices in table.weights for matrix in matrices)
    return Measurement(
        layer=layer,
        num_rows=num_rows,
        num_adapters=num_adapters,
        rank=rank,
        lora_s=do_bench(lora_graph.replay, return_mode="median") * 1e-3,
        base_s=do_bench(base_graph.replay, return_mode="median") * 1e-3,
        floor_s=(weight_bytes + x.nbytes + 2 * y.nbytes) / bandwidth,
    )


def main() -> None:
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, and there is none here.")
        return
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, a copy moves {bandwidth / 1e12:.2f} TB/s")
    print("layer     rows adapters rank  LoRA us floor us  floor  base us  added")
    for layer in LAYERS:
        for num_rows, num_adapters in BATCHES:
            for rank in RANKS:
                print(measure(layer, num_rows, num_adapters, rank, bandwidth).line())


if __name__ == "__main__":
    main()
