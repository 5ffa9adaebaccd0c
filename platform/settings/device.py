"""The settings of one subject: the base model, and the device that computes it."""

from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import (
    ModelReference,
    one_of,
    parse_bytes,
    parse_cores,
    parse_device,
    parse_flag,
    parse_model,
    parse_share,
    parse_text,
    whole,
)


@dataclass(frozen=True)
class DeviceSettings:
    """The base model, and the device that computes it."""

    model: Path | ModelReference | None = setting(None, parse_model)
    """The base model: its folder, `hf:ORGANISATION/NAME@REVISION`, or `s3://BUCKET/PREFIX` (also gs:// and az://)."""
    served_model_name: str | None = setting(None, parse_text)
    """The name of the base model for clients. None is the name of its folder, or the last part of its name elsewhere."""
    demo: bool = setting(False, parse_flag)
    device: str = setting("auto", parse_device)
    dtype: str = setting("auto", one_of("auto", "float32", "bfloat16", "float16"))
    kv_dtype: str = setting("auto", one_of("auto", "int8", "fp8"))
    """How keys and values are stored on all tiers: `int8` or `fp8` (a byte for each, and a scale for each head of a token),
    or `auto`: the dtype of the weights."""
    quantization: str | None = setting(None, one_of("int8", "int4"))
    """To what the weights of linear layers are rounded when they are loaded: `int8` or `int4`. None serves them as the
    checkpoint holds them."""
    activation_dtype: str = setting("auto", one_of("auto", "fp8"))
    """In what layers with fp8 weights multiply on a GPU: `fp8` rounds each row of their input too, with a scale of its own, or
    `auto`: the dtype of the model."""
    tensor_parallel: int = setting(1, whole(1, 8))
    """Devices of this machine that compute one model together, 1 to 8. Each holds a part of each layer."""
    threads: int = setting(1, whole(1, 1024))
    """CPU threads of one engine, 1 to 1024."""
    engine_cores: tuple[int, ...] | None = setting(None, parse_cores)
    """The cores of this machine, by number from 0, that engines keep to, and that the gateway of `serve` leaves to them.
    None lets the system choose. Linux only."""
    device_bytes: int | None = setting(None, parse_bytes)
    """Bytes of device memory for KV and adapters together. None is the engine's default."""
    memory_share: float = setting(0.9, parse_share)
    """The part of a GPU's memory, above 0 and up to 1, that the engine takes of what is free beside the weights."""
    max_context_tokens: int | None = setting(None, whole(1))
    """The longest context that is served. None is the model's own."""
    lora_pool_bytes: int | None = setting(None, parse_bytes)
    """The most bytes of `device_bytes` for adapters. None sets no limit besides the reserve of the KV."""
    lora_host_bytes: int | None = setting(None, parse_bytes)
    """Bytes of host memory for adapters, from which they are copied to the device."""
    kernels: str = setting("auto", one_of("auto", "native", "triton", "torch"))
    """What computes attention, row operations, adapters, quantised weights and sampling: `auto`, `triton` (CUDA), `torch`,
    or `native` (a CPU's kernel for adapters). `auto` takes those of the device that work there."""
    lora_kernels: str | None = setting(None, one_of("auto", "native", "triton", "torch"))
    """The former setting for adapters alone: `auto`, `native`, `triton` or `torch`. None means `kernels`."""
    row_kernels: str | None = setting(None, one_of("auto", "triton", "torch"))
    """The former setting for row operations alone: `auto`, `triton` or `torch`. None means `kernels`."""
    attention_backend: str | None = setting(None, one_of("auto", "triton", "torch"))
    """The former setting for attention alone: `auto`, `triton` or `torch`. None means `kernels`."""
    cuda_graphs: str = setting("auto", one_of("auto", "windows", "off"))
    """Whether steps are CUDA graphs: `auto` (on CUDA, if all kernels work), `windows` (those with attention windows too),
    or `off`.
    """
    renew_calibration: bool = setting(False, parse_flag)
    """Whether engines measure this machine and hash the model again at their start, in place of what `data_dir` has from an
    earlier one.
    """
