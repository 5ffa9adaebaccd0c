"""The served model families: one small configuration of each, its checkpoint and adapters, and their references.

transformers and peft write the files and are the references. Adapters are read as an upload is: from peft's own files.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from graftwork.adapters.format.identity import identify_adapter
from graftwork.adapters.registry.artifact_store import LocalArtifacts
from graftwork.adapters.registry.weights import ArtifactAdapterSource
from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.stats import EngineDescription
from graftwork.engine.lora.weights import AdapterWeights
from graftwork.platform.errors import NotFound
from tests.adapters.adapter_files import store_files
from tests.engine.engine_driver import EngineDriver
from tests.engine.parallel.rank_threads import start_thread

ADAPTER = "lora"
WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.0, 2.5, 7.0],
    "partial_rotary_factor": 0.75,
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
GEMMA3N: dict[str, Any] = SIZES | {
    "num_hidden_layers": 5,
    "head_dim": 8,
    "layer_types": [*ALTERNATING, "full_attention", "sliding_attention"],
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 16,
    "final_logit_softcapping": 5.0,
}


def llama(rope_type: str = "default", scaling: dict[str, Any] | None = None, **options: Any) -> PreTrainedConfig:
    rope = {"rope_type": rope_type, "rope_theta": 10_000.0, **(scaling or {})}
    return LlamaConfig(**SIZES, rope_parameters=rope, **options)


FIRST_FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-biased": llama(attention_bias=True, mlp_bias=True, head_dim=12),
    "llama-tied": llama(tie_word_embeddings=True),
    "llama-linear": llama("linear", {"factor": 2.0}),
    "llama-dynamic": llama("dynamic", {"factor": 2.0}),
    "llama-llama3": llama("llama3", LLAMA3),
    "llama-yarn": llama("yarn", YARN),
    "llama-yarn-attention-factor": llama("yarn", YARN | {"attention_factor": 0.6}),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "mistral-windows": MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-windows": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "qwen3-windows": Qwen3Config(
        **SIZES, head_dim=8, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
}
LATER_FAMILIES: dict[str, PreTrainedConfig] = {
    "granite": GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=3.0,
        tie_word_embeddings=True,
    ),
    "olmo2": Olmo2Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
    "smollm3-windows": SmolLM3Config(
        **SIZES, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
    "phi3-windows": Phi3Config(**SIZES, sliding_window=WINDOW),
    "phi4-short": Phi3Config(**SIZES, rope_parameters=dict(LONG_ROPE), original_max_position_embeddings=64),
    "phi4-long": Phi3Config(
        **SIZES, rope_parameters=LONG_ROPE | {"attention_factor": 1.2}, original_max_position_embeddings=3
    ),
    "gemma2": Gemma2Config(
        **SIZES,
        **WINDOWS,
        head_dim=8,
        query_pre_attn_scalar=14,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma2-wide": Gemma2Config(**SIZES, head_dim=16, sliding_window=4096, attn_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWS, head_dim=8, query_pre_attn_scalar=14, rope_parameters=GEMMA3_ROPES),
    "gemma3n": Gemma3nTextConfig(
        **GEMMA3N,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.9, 0.0, 0.5, 0.0, 0.6],
        altup_active_idx=1,
    ),
    "gemma3n-wide": Gemma3nTextConfig(
        **GEMMA3N | {"intermediate_size": [40, 24, 40, 56, 24]},
        sliding_window=4096,
        num_kv_shared_layers=0,
        altup_num_inputs=3,
        altup_correct_scale=False,
        rope_parameters=GEMMA3_ROPES,
    ),
    "cohere2": Cohere2Config(**SIZES, **WINDOWS, logit_scale=0.5),
    "cohere2-wide": Cohere2Config(**SIZES, sliding_window=4096, layer_types=ALTERNATING, attention_bias=True),
    "glm4": Glm4Config(**SIZES, head_dim=16),
}
FAMILIES = FIRST_FAMILIES | LATER_FAMILIES
ONE_LAYER = SIZES | {"num_hidden_layers": 1, "sliding_window": WINDOW}
FEW_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ONE_WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention"]}
ONE_SLIDING_LAYER: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**ONE_LAYER),
    "qwen2": Qwen2Config(**ONE_LAYER, use_sliding_window=True, max_window_layers=0),
    "qwen3": Qwen3Config(**ONE_LAYER, **ONE_WINDOW, use_sliding_window=True),
    "smollm3": SmolLM3Config(**ONE_LAYER, **ONE_WINDOW, use_sliding_window=True),
    "phi3": Phi3Config(**ONE_LAYER),
    "gemma2": Gemma2Config(**ONE_LAYER, **ONE_WINDOW, head_dim=8),
    "gemma3": Gemma3TextConfig(**ONE_LAYER, **ONE_WINDOW, head_dim=8),
    "cohere2": Cohere2Config(**ONE_LAYER, **ONE_WINDOW, logit_scale=1.0),
    "mixtral": MixtralConfig(**ONE_LAYER, num_local_experts=4),
    "qwen2-moe": Qwen2MoeConfig(**ONE_LAYER, use_sliding_window=True, **FEW_EXPERTS),
    "qwen3-moe": Qwen3MoeConfig(**ONE_LAYER, use_sliding_window=True, **FEW_EXPERTS),
    "gpt-oss": GptOssConfig(**ONE_LAYER, num_local_experts=4),
}
ALL = "all-linear"
KINDS: Mapping[str, dict[str, Any]] = {
    ADAPTER: {"r": 4, "lora_alpha": 8, "target_modules": ALL},
    "rslora": {"r": 5, "use_rslora": True, "target_modules": ALL},
    "dora": {"r": 4, "use_dora": True, "target_modules": ALL},
    "lora-bias": {"r": 3, "lora_bias": True, "target_modules": ALL},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "o_proj"]},
    "head": {"r": 4, "target_modules": ["lm_head", "down_proj"]},
    "saved": {"r": 4, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}
"""Every kind of adapter that is served: the options of peft's LoraConfig."""


@dataclass(frozen=True)
class PeftFolders:
    """An AdapterSource over folders that peft has written. The name of a folder stands for its digest."""

    folder: Path
    description: EngineDescription

    def load(self, digest: str) -> AdapterWeights:
        own = self.folder / digest
        if not own.exists():
            raise NotFound(f"There is no adapter {digest}.")
        config, weights = ((own / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors"))
        _, found = identify_adapter(config, weights, self.description)
        store = self.folder / "stored"
        if not store.exists() or not any(store.rglob(found.removeprefix("sha256:"))):
            store_files(LocalArtifacts(store), found, config, weights)
        return replace(ArtifactAdapterSource(LocalArtifacts(store), self.description).load(found), digest=digest)


@dataclass(frozen=True)
class Family:
    """One model, adapters for it, and the reference of each by name; None is the model alone."""

    folder: Path
    references: dict[str | None, torch.nn.Module]

    def engine(self, **options: Any) -> EngineDriver:
        settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 2 * 2**20} | options
        config = EngineConfig(model=self.folder, **settings)
        adapters = self.folder.parent / "adapters"
        return EngineDriver(build_engine(config, lambda found: PeftFolders(adapters, found), start_worker=start_thread))


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Set norms and biases to random values; transformers initialises them with ones and zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "scale")):
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=generator))


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_adapter(base: Path, folder: Path, **options: Any) -> torch.nn.Module:
    """A random adapter, saved by peft, and the model with it as peft loads it."""
    model = load_model(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft doubts that some of them can be merged, which nobody asks for
        adapted = get_peft_model(model, LoraConfig(**{"lora_alpha": 8} | options))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1.0 + 0.2 * torch.rand_like(parameter))
                elif "lora_" in name:
                    parameter.normal_(std=0.3)
                elif "modules_to_save" in name:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
        loaded: torch.nn.Module = PeftModel.from_pretrained(load_model(base), folder)
    return loaded.requires_grad_(False).train(False)


def make_family(
    config: PreTrainedConfig,
    root: Path,
    kinds: tuple[str, ...] = (ADAPTER,),
    options: Mapping[str, dict[str, Any]] = KINDS,
) -> Family:
    """A random model of a family with adapters: `options` of peft's LoraConfig by the names in `kinds`."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    randomise(base, torch.Generator().manual_seed(1))
    base.save_pretrained(root / "base")
    references: dict[str | None, torch.nn.Module] = {None: load_model(root / "base").requires_grad_(False).train(False)}
    for kind in kinds:
        references[kind] = make_adapter(root / "base", root / "adapters" / kind, **options[kind])
    return Family(root / "base", references)
