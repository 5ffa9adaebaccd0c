"""Chooses the device and the dtype of an engine, and sets up the memory allocator of the process."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
import torch
from graftwork.engine.kv.transfer.device_memory import KvCache
from graftwork.engine.core.step import StepPlan, StepResult
from graftwork.engine.runner.input_batch import AdapterRun, BatchBuilder, BatchTensors
from graftwork.engine.model.checkpoint import Checkpoint
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.runner.decoder import Decoder
from graftwork.engine.model.weights import load_decoder_weights
from graftwork.engine.grammar.matching.masks import MaskFiller
from graftwork.engine.lora.torch_backend import Segment
from graftwork.engine.lora.backend import LoraBackend
from graftwork.engine.lora.packs import AdapterMix
from graftwork.engine.lora.pool import LoraPool
from graftwork.engine.model.config import ModelConfig
from graftwork.engine.core.events import TokenLogprobs
from graftwork.engine.model.rotary import RotaryTable
from graftwork.engine.sampling.sampler import choose_tokens
from graftwork.engine.sampling.logprobs import RawScores
from graftwork.platform.errors import GraftworkError, InvalidRequest
from graftwork.platform.ids import RequestId

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


_KEPT_BYTES = 2**30


_OLDER_LIMIT = 2**25  # the largest threshold that older versions take


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, up to a gigabyte, instead of giving it back to the system.

    A prefill makes and drops tensors of megabytes in every layer; fetched anew each time, their pages took a third of
    its time (measured: 0.49 s and 0.32 s for 2,048 tokens of the CPU yardstick). Elsewhere than on Linux with glibc
    this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        if not mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
            mallopt(_M_MMAP_THRESHOLD, _OLDER_LIMIT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Read the checkpoint onto the device."""
    weights = load_decoder_weights(Checkpoint(config.model), model, device, dtype)
    return Decoder(model, weights, RotaryTable(model.head_dim, model.rope, model.context_tokens, device))


def _cpu_multiplies_bfloat16() -> bool:
    """Where it does not, torch's bf16 GEMM was measured at a tenth of the fp32 one."""
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own, but float32 on a CPU that has no instructions for anything shorter."""
    wanted = model.dtype if name == "auto" else name
    if name == "auto" and device.type == "cpu" and not _cpu_multiplies_bfloat16():
        wanted = "float32"
    if wanted not in _DTYPES:
        raise InvalidRequest(f"dtype {wanted!r} is not served: choose one of {', '.join(_DTYPES)}.", param="dtype")
    return _DTYPES[wanted]
