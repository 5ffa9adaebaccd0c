"""Attention, LoRA and sampling kernels beside the floors that memory and arithmetic set.

The cells and the way to measure them are those of paged_attention.py, lora_kernels.py and sampler_step.py.
"""

import time
from dataclasses import asdict, fields

import lora_kernels
import paged_attention
import sampler_step
import torch
from gpu.phase_run import PhaseRun

from graftwork.engine.lora.triton.tiles import build_segments

_SAMPLER = {"batch": 32, "vocabulary": 128_256, "history": 2000}
_SAMPLER_ROUNDS = 20


def measure_attention(run: PhaseRun) -> None:
    """One layer of attention in each step."""
    bandwidth, operations = (0.0, 0.0) if run.is_dry else paged_attention.ceilings()
    for cell in run.while_time(paged_attention.CELLS):
        found = (
            paged_attention.measure_host(cell) if run.is_dry else paged_attention.measure(cell, bandwidth, operations)
        )
        run.add("attention", asdict(found) | ({"plan_host_s": None} if run.is_dry else {}))
        _free(run)


def measure_lora(run: PhaseRun) -> None:
    """One fused layer in each step. The cells of batch 32 and rank 16 come first, because the time may not do for all."""
    bandwidth = 0.0 if run.is_dry else lora_kernels.copy_bandwidth()
    cells = sorted(lora_kernels.cells(), key=lambda cell: (cell.num_rows != 32, cell.ranks != (16,)))
    for cell in run.while_time(cells):
        started = time.perf_counter()
        build_segments(cell.owners, run.device, tile_rows=cell.chosen_tile_rows)
        plan_host_s = time.perf_counter() - started
        if run.is_dry:
            row = {field.name: None for field in fields(lora_kernels.Measurement)} | {"cell": asdict(cell)}
            run.add("lora", row | {"plan_host_s": None})
        else:
            run.add("lora", asdict(lora_kernels.measure(cell, bandwidth)) | {"plan_host_s": plan_host_s})
            _free(run)


def measure_sampler(run: PhaseRun) -> None:
    """The kernels of one step's sampling, feature by feature."""
    if run.is_dry:
        for feature in sampler_step.prepare_on_device(**_SAMPLER, device=torch.device("cpu")):
            row = {field.name: None for field in fields(sampler_step.Figure)}
            run.add("sampler", row | {"feature": feature})
        return
    for figure in sampler_step.measure_on_device(**_SAMPLER, rounds=_SAMPLER_ROUNDS):
        run.add("sampler", asdict(figure))


def _free(run: PhaseRun) -> None:
    if not run.is_dry:
        torch.cuda.empty_cache()
