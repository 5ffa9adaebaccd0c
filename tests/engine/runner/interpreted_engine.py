"""Names of the modules that an engine needs whose every kernel is interpreted."""

ENGINE = "graftwork.engine"
MODULES = tuple(
    f"{ENGINE}.{name}"
    for name in (
        *(f"kernels.{name}" for name in ("blocks", "codes", "norm", "activation", "angles", "rotary", "take_tokens")),
        *(f"lora.triton.{name}" for name in ("expand_blocks", "row_kernels", "tile_kernels", "launch", "fused_lora")),
        *(f"lora.triton.{name}" for name in ("selftest", "backend")),
        *(f"experts.triton.{name}" for name in ("kernels", "launch", "code_kernels", "code_launch", "products")),
        *(f"experts.triton.{name}" for name in ("float8_launch", "backend", "selftest")),
        *(f"quantization.triton.{name}" for name in ("kernels", "launch", "products", "selftest")),
        *(f"quantization.triton.{name}" for name in ("float8_kernels", "float8_launch")),
        *(
            f"attention.{name}"
            for name in ("online_softmax", "paged_kernels", "rolling_kernels", "launch", "reference")
        ),
        *(f"attention.{name}" for name in ("triton_attention", "selftest")),
        *(f"sampling.device.{name}" for name in ("number_math", "edit_kernel", "weigh_kernels", "choose_kernel")),
        *(f"sampling.device.{name}" for name in ("launches", "device_sampler")),
        *(f"runner.{name}" for name in ("triton_row_ops", "row_selftest", "packed_forward", "step_graphs")),
    )
)
USED_BY_ENGINES = tuple(
    f"{ENGINE}.{name}"
    for name in (
        "lora.triton.selftest",
        "lora.triton.backend",
        "experts.triton.backend",
        "experts.triton.products",
        "experts.triton.selftest",
        "quantization.triton.products",
        "quantization.triton.selftest",
        "attention.triton_attention",
        "attention.selftest",
        "runner.triton_row_ops",
        "runner.row_selftest",
        "runner.packed_forward",
        "runner.step_graphs",
    )
)
"""The modules that engine/build loads by name."""
