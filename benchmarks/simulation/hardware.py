"""The machine that is simulated: an 8 B model on a device of 80 GB, with a host and a disk below it.

Figures are those of Llama 3.1 8B in bf16 on one H100 with PCIe 5, by arithmetic (weights 16 GB, KV 128 KiB a token,
400 TFLOP/s reached in prefill). Traces divide their tokens by a factor, and so does `scaled` with everything here:
one token of a trace stands for `factor` tokens of the machine, and all times stay as they are.
"""

from dataclasses import dataclass

from graftwork.engine.kv.index.cost_model import LoadCost, PrefillCost, TransferCost
from graftwork.engine.kv.index.kv_sizes import KvSizes


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates in bytes or tokens a second, as the machine has them."""

    kv_token_bytes: int = 2 * 32 * 8 * 128 * 2
    """Keys and values × layers × KV heads × head width × 2 bytes."""
    device_kv_bytes: float = 60e9
    host_kv_bytes: float = 120e9
    disk_kv_bytes: float = 1000e9
    host_bytes_per_s: float = 50e9
    """In each direction."""
    disk_read_bytes_per_s: float = 6e9
    disk_write_bytes_per_s: float = 3e9
    transfer_fixed_s: float = 1e-3
    prefill_token_s: float = 16e9 / 400e12
    prefill_attended_s: float = 4 * 32 * 4096 / 400e12
    prefill_fixed_s: float = 0.01
    decode_token_s: float = 0.015
    """Of one sequence in a batch."""
    most_running: int = 128
    most_waiting: int = 128
    context_tokens: int = 131_072


@dataclass(frozen=True, slots=True)
class ScaledHardware:
    """A machine in the tokens of a trace."""

    sizes: KvSizes
    disk_pages: int
    costs: LoadCost
    save: TransferCost
    store: TransferCost
    decode_token_s: float
    most_running: int
    most_waiting: int


def scaled(hardware: Hardware, factor: float, page_tokens: int = 16) -> ScaledHardware:
    """The machine for traces whose tokens were divided by `factor`."""
    page_bytes = round(hardware.kv_token_bytes * page_tokens * factor)

    def transfer(bytes_per_s: float) -> TransferCost:
        return TransferCost(hardware.transfer_fixed_s, page_bytes / bytes_per_s)

    sizes = KvSizes(
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        device_pages=int(hardware.device_kv_bytes / page_bytes),
        host_pages=int(hardware.host_kv_bytes / page_bytes),
        context_pages=int(hardware.context_tokens / factor / page_tokens) + 1,
    )
    prefill = PrefillCost(
        hardware.prefill_token_s * factor, hardware.prefill_attended_s * factor**2, hardware.prefill_fixed_s
    )
    host = transfer(hardware.host_bytes_per_s)
    return ScaledHardware(
        sizes=sizes,
        disk_pages=int(hardware.disk_kv_bytes / page_bytes),
        costs=LoadCost(host, transfer(hardware.disk_read_bytes_per_s), prefill),
        save=host,
        store=transfer(hardware.disk_write_bytes_per_s),
        decode_token_s=hardware.decode_token_s * factor,
        most_running=hardware.most_running,
        most_waiting=hardware.most_waiting,
    )
