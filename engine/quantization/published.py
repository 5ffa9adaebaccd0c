"""Reads `quantization_config` of a config.json: GPTQ, AWQ, compressed-tensors and fp8.

Never imports torch, because the gateway reads configurations too. Invariant: a setting that is not known, or has a value
that is not served, is refused by name; what only concerns how the checkpoint was made is known and has no effect.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from graftwork.engine.quantization.scheme import Method, Quantization, Scheme, joined_names
from graftwork.platform.errors import InvalidRequest

_GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
_HEAD = "lm_head"
_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale")
_UNUSED_FLOAT8 = (*_UNUSED, "input_scale_ub", "activation_scale")


def read_quantization(found: Mapping[str, Any], prefix: str | None = None) -> Quantization | None:
    """Reads the setting `quantization_config` of a config.json. None if it is absent or null.

    `prefix` is what names in it have in place of "model.", if the model is within another one.

    Raises InvalidRequest if it cannot be served.
    """
    settings = found.get("quantization_config") or found.get("compression_config")
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        raise refused(f"must be an object, not {settings!r}.")
    method = settings.get("quant_method")
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise refused(f"quant_method {method!r} is not served; served is one of {', '.join(_READERS)}.")
    try:
        return replace(reader(settings), prefix=prefix)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise refused(f"a setting of {method} has a value of the wrong kind ({error}).") from error


def refused(problem: str) -> InvalidRequest:
    """Returns the error for a `quantization_config` that cannot be served."""
    return InvalidRequest(f"config.json: quantization_config: {problem}", param="model")


def _only(settings: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]], ignored: tuple[str, ...]) -> None:
    """Raises InvalidRequest for a setting that is neither ignored nor has one of its known values."""
    for name, value in settings.items():
        if name in ignored or name == "quant_method":
            continue
        if name not in known and value is not None:
            raise refused(f"{name} {value!r} is no setting that is served for {settings['quant_method']}.")
        if name in known and known[name] and value not in known[name]:
            served = " or ".join(map(repr, known[name]))
            raise refused(f"{name} {value!r} is not served for {settings['quant_method']}; served is {served}.")


def _group_size(value: object) -> int | None:
    """Returns a group size; None for one scale for each output, which files write as -1 or null."""
    if value in (-1, None):
        return None
    if value not in _GROUP_SIZES:
        raise refused(
            f"group_size {value!r} is not served; served is -1 or one of {', '.join(map(str, _GROUP_SIZES))}."
        )
    assert isinstance(value, int)
    return value


_GPTQ_MADE_BY = (
    *(
        "dataset",
        "damp_percent",
        "damp_auto_increment",
        "true_sequential",
        "static_groups",
        "model_seqlen",
        "tokenizer",
    ),
    *("block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id", "use_cuda_fp16"),
    *("cache_block_outputs", "exllama_config", "use_exllama", "max_input_length", "disable_exllama", "backend"),
    *("model_name_or_path", "model_file_base_name", "quantizer", "meta", "mse", "lm_head", "desc_act", "group_size"),
    *("modules_in_block_to_quantize", "pack_dtype", "modules_to_not_convert", "act_group_aware", "rotation"),
    *("format", "is_distributed"),
)
_V1_FORMATS = (None, "gptq")


def _read_gptq(settings: Mapping[str, Any]) -> Quantization:
    known: dict[str, tuple[Any, ...]] = {
        "bits": (4, 8),
        "sym": (True, False),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "is_marlin_format": (False, None),
        "dynamic": (),
        "adapter": (None, {}),
    }
    _only(settings, known, _GPTQ_MADE_BY)
    form = settings.get("checkpoint_format", settings.get("format"))
    if form not in ("gptq_v2", *_V1_FORMATS):
        raise refused(f"format {form!r} is not served for gptq; served is 'gptq' or 'gptq_v2'.")
    if settings.get("pack_dtype") not in (None, "int32"):
        raise refused(f"pack_dtype {settings['pack_dtype']!r} is not served for gptq; served is 'int32'.")
    scheme = Scheme(
        Method.GPTQ,
        int(settings["bits"]),
        _group_size(settings["group_size"]),
        is_symmetric=bool(settings.get("sym", True)),
        has_order=bool(settings.get("desc_act", False)),
        zero_offset=1 if form in _V1_FORMATS else 0,
    )
    quantized = [name for group in settings.get("modules_in_block_to_quantize") or [] for name in group]
    head = () if settings.get("lm_head") else (_HEAD,)
    excluded = (*joined_names(settings.get("modules_to_not_convert")), *head, *_gptq_exceptions(settings))
    if quantized:
        excluded += (f"re:(?!.*\\.({'|'.join(name.replace('.', chr(92) + '.') for name in quantized)})$)",)
    return Quantization(scheme, excluded)


def _gptq_exceptions(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Reads `dynamic` of GPTQModel: patterns of layers with settings of their own. Those that begin with "-:" are plain."""
    patterns = settings.get("dynamic") or {}
    others = [pattern for pattern in patterns if not pattern.startswith("-:")]
    if others:
        raise refused(f"dynamic with {others[0]!r} is not served for gptq; served are patterns that begin with '-:'.")
    return tuple(f"re:{pattern.removeprefix('-:')}" for pattern in patterns)


def _read_awq(settings: Mapping[str, Any]) -> Quantization:
    known = {
        "bits": (4,),
        "w_bit": (4,),
        "version": ("gemm", "GEMM"),
        "zero_point": (True,),
        "backend": (None, "autoawq", "auto"),
    }
    ignored = ("group_size", "q_group_size", "modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    _only(settings, known, (*ignored, "exllama_config"))
    if "bits" not in settings and "w_bit" not in settings:
        raise refused("bits is missing for awq; served is 4.")
    group = _group_size(settings["group_size"] if "group_size" in settings else settings["q_group_size"])
    excluded = (*joined_names(settings.get("modules_to_not_convert")), _HEAD)
    return Quantization(Scheme(Method.AWQ, 4, group, is_symmetric=False), excluded)


_CT_FORMATS = {
    "pack-quantized": Method.COMPRESSED_INTEGERS,
    "int-quantized": Method.INTEGERS,
    "float-quantized": Method.FLOAT8,
    "naive-quantized": None,
}
_CT_MADE_BY = ("version", "global_compression_ratio", "ignore", "config_groups", "kv_cache_scheme", "config_type")
_CT_WEIGHTS_MADE_BY = ("observer", "observer_kwargs", "group_size", "block_structure", "scale_dtype", "zp_dtype")


def _read_compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    known = {
        "format": tuple(_CT_FORMATS),
        "quantization_status": ("compressed",),
        "sparsity_config": (None, {}, {"format": "dense"}),
        "transform_config": (None, {}),
    }
    _only(settings, known, _CT_MADE_BY)
    groups = settings["config_groups"]
    if len(groups) != 1:
        raise refused(f"{len(groups)} config_groups are not served for compressed-tensors; served is one.")
    (group,) = groups.values()
    if group.get("targets") != ["Linear"]:
        raise refused(f"targets {group.get('targets')!r} is not served for compressed-tensors; served is ['Linear'].")
    if group.get("output_activations"):
        raise refused("output_activations is not served for compressed-tensors.")
    form = group.get("format") or settings.get("format")
    if form not in _CT_FORMATS:
        raise refused(f"format {form!r} is not served for compressed-tensors; served is {', '.join(_CT_FORMATS)}.")
    scheme = _ct_scheme(group["weights"], _CT_FORMATS[form], settings)
    return Quantization(scheme, tuple(joined_names(settings.get("ignore"))), _UNUSED)


def _ct_scheme(weights: Mapping[str, Any], method: Method | None, settings: Mapping[str, Any]) -> Scheme:
    known = {
        "num_bits": (4, 8),
        "type": ("int", "float"),
        "symmetric": (True, False),
        "strategy": ("tensor", "channel", "group", "block"),
        "dynamic": (False,),
        "actorder": (None, "weight", "static", "group", "dynamic", False),
    }
    _only({**weights, "quant_method": settings["quant_method"]}, known, _CT_WEIGHTS_MADE_BY)
    bits, kind, strategy = weights["num_bits"], weights.get("type", "int"), weights.get("strategy")
    if strategy is None:
        strategy = "group" if weights.get("group_size") not in (None, -1) else "tensor"
    method = method or (Method.FLOAT8 if kind == "float" else Method.INTEGERS)
    is_float = method is Method.FLOAT8
    if is_float != (kind == "float") or (is_float and bits != 8) or (method is Method.INTEGERS and bits != 8):
        raise refused(f"type {kind!r} with num_bits {bits} does not belong to the format {method.value!r}.")
    if is_float and weights.get("symmetric", True) is not True:
        raise refused("symmetric false is not served for float weights.")
    if is_float and strategy == "group":
        raise refused("strategy 'group' is not served for float weights; served is tensor, channel or block.")
    block = _block(weights.get("block_structure")) if strategy == "block" else None
    if block is not None and not is_float:
        raise refused("strategy 'block' is not served for integers; served is tensor, channel or group.")
    return Scheme(
        method,
        bits,
        _group_size(weights["group_size"]) if strategy == "group" else (block[1] if block else None),
        is_symmetric=bool(weights.get("symmetric", True)),
        has_order=weights.get("actorder") in ("group", "dynamic"),
        block=block,
    )


def _block(value: object) -> tuple[int, int]:
    """Returns the outputs and input features of a block of FLOAT8 that share a scale."""
    if not isinstance(value, list | tuple) or len(value) != 2 or value[1] not in _GROUP_SIZES or not value[0] > 0:
        raise refused(f"weight blocks of {value!r} are not served; served is such as [128, 128].")
    return int(value[0]), int(value[1])


def _read_fp8(settings: Mapping[str, Any]) -> Quantization:
    known: dict[str, tuple[Any, ...]] = {
        "activation_scheme": ("dynamic", "static"),
        "fmt": (None, "e4m3"),
        "weight_block_size": (),
        "modules_to_not_convert": (),
        "ignored_layers": (),
        "scale_fmt": (None, "float"),
        "dequantize": (True, False),
        "kv_cache_scheme": (),
        "is_checkpoint_fp8_serialized": (True,),
        "expert_dtype": (None, "fp8"),
        "modules_to_convert": (None, []),
        "activation_scale_ub": (),
    }
    _only(settings, known, ())
    block = settings.get("weight_block_size")
    given = block is not None
    excluded = [*joined_names(settings.get("modules_to_not_convert")), *joined_names(settings.get("ignored_layers"))]
    size = _block(block) if given else None
    scheme = Scheme(
        Method.FLOAT8,
        8,
        None if size is None else size[1],
        block=size,
        scale_name="weight_scale_inv" if given else "weight_scale",
    )
    return Quantization(scheme, (*excluded, _HEAD), _UNUSED_FLOAT8)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
}
"""The readers of what is served, by `quant_method`."""
