"""The machine and its ceilings, and whether each room's kernels give the results of their oracles there."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from gpu.phase_run import PhaseRun
from gpu.random_engine import model_config
from gpu.weight_products import FORMS, random_weight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def measure_machine(run: PhaseRun) -> None:
    """Versions, the device, and the rates that its copies and its products reach."""
    import triton

    figures: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": _commit(),
    }
    device: dict[str, object] = dict.fromkeys(("name", "capability", "num_sms", "memory_bytes", "free_bytes"))
    ceilings: dict[str, float | None] = dict.fromkeys(("copy_bytes_per_s", "operations_per_s"))
    if not run.is_dry:
        from paged_attention import ceilings as measured

        found = torch.cuda.get_device_properties(0)
        device |= {"name": found.name, "capability": [found.major, found.minor], "num_sms": found.multi_processor_count}
        device |= {"memory_bytes": found.total_memory, "free_bytes": torch.cuda.mem_get_info()[0]}
        ceilings = dict(zip(ceilings, measured(), strict=True))
    run.add("versions", figures)
    run.add("device", device)
    run.add("ceilings", ceilings)


def _commit() -> str | None:
    """The commit that is measured; None where git or its folder is missing."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def measure_trials(run: PhaseRun) -> None:
    """The trials that an engine makes at its start, in every dtype. The first of each compiles its kernels.

    Exits with status 1 after all of them if one has failed.
    """
    failures = []
    for name, trial in run.while_time(_trials(run), name=lambda pair: pair[0]):
        started = time.perf_counter()
        failure = trial()
        run.add("trials", {"trial": name, "failure": failure, "seconds": None if run.is_dry else _since(started)})
        failures += [] if failure is None else [f"{name}: {failure}"]
    if failures:
        sys.exit("\n".join(failures))


def _trials(run: PhaseRun) -> list[tuple[str, Callable[[], str | None]]]:
    from graftwork.engine.attention.selftest import why_attention_fails
    from graftwork.engine.experts.triton.selftest import why_code_experts_fail, why_expert_kernels_fail
    from graftwork.engine.lora.triton.selftest import why_kernels_fail
    from graftwork.engine.quantization.triton.selftest import why_weight_kernels_fail
    from graftwork.engine.runner.row_selftest import why_row_kernels_fail
    from graftwork.engine.sampling.device.selftest import why_sampler_fails

    device, model = torch.device(run.device), model_config(run.shape)
    trials: list[tuple[str, Callable[[], str | None]]] = [("sampler", partial(why_sampler_fails, device))]
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        trials += [
            (f"lora {name}", partial(why_kernels_fail, device, dtype)),
            (f"rows {name}", partial(why_row_kernels_fail, device, dtype)),
            (f"experts {name}", partial(why_expert_kernels_fail, device, dtype)),
            (f"attention {name}", partial(why_attention_fails, model, 16, device, dtype)),
            (f"attention windows {name}", partial(why_attention_fails, model, 16, device, dtype, rolling=True)),
        ]
        for kv in () if dtype != torch.bfloat16 else ("int8",) if run.is_dry else ("int8", "fp8"):
            attention = partial(why_attention_fails, model, 16, device, dtype, kv_dtype=kv)
            trials += [
                (f"rows {name} {kv} KV", partial(why_row_kernels_fail, device, dtype, kv_dtype=kv)),
                (f"attention {name} {kv} KV", attention),
                (f"attention windows {name} {kv} KV", partial(attention, rolling=True)),
            ]
        for form in FORMS if not run.is_dry else ("int8",) if dtype == torch.bfloat16 else ():
            weight, rounds_rows = random_weight(form, 8, 256, "cpu"), form == "fp8 rows"
            trials.append(
                (
                    f"weights {form} {name}",
                    partial(why_weight_kernels_fail, weight, device, dtype, rounds_rows=rounds_rows),
                )
            )
            of_experts = partial(why_code_experts_fail, weight, device, dtype, rounds_rows=rounds_rows)
            trials.append((f"experts {form} {name}", of_experts))
    return trials


def _since(started: float) -> float:
    return time.perf_counter() - started
