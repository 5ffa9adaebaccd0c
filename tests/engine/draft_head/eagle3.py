"""EAGLE-3 as its paper and its authors' code say it, in plain torch: the reference of the engine's draft head.

Slow and simple: one text, no cache, every pair computed anew for every guess. Shares no code with the engine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


def make_head(folder: Path, base: Path, *, seed: int = 3, draft_vocab: int | None = None, **settings: Any) -> Path:
    """A random head for a model folder, in the files that are published."""
    model = json.loads((base / "config.json").read_text())
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model["hidden_size"],
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
        "vocab_size": model["vocab_size"],
        "draft_vocab_size": draft_vocab or model["vocab_size"],
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **settings,
    }
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    tensors = {
        "fc.weight": random(hidden, 3 * config.get("target_hidden_size", model["hidden_size"])),
        "midlayer.hidden_norm.weight": 1 + random(hidden),
        "midlayer.input_layernorm.weight": 1 + random(hidden),
        "midlayer.post_attention_layernorm.weight": 1 + random(hidden),
        "midlayer.self_attn.q_proj.weight": random(query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, query),
        "midlayer.mlp.gate_proj.weight": random(wide, hidden),
        "midlayer.mlp.up_proj.weight": random(wide, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, wide),
        "norm.weight": 1 + random(hidden),
        "lm_head.weight": random(config["draft_vocab_size"], hidden),
    }
    if draft_vocab is not None:
        chosen = torch.randperm(model["vocab_size"], generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(model["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Eagle3:
    """A head over a reference model of transformers."""

    folder: Path
    model: torch.nn.Module

    def __post_init__(self) -> None:
        self.config = json.loads((self.folder / "config.json").read_text())
        self.weights = {name: one.double() if one.is_floating_point() else one for name, one in self._files().items()}

    def _files(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")

    def after_layers(self, num_layers: int) -> list[int]:
        ids = self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        return [2, num_layers // 2, num_layers - 3] if ids is None else [one + 1 for one in ids]

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], num_drafted: int, first: int) -> torch.Tensor:
        """The logits of the served model's vocabulary for the token after a text, whose last `num_drafted` tokens are drafts.

        The head has read the text from token `first` on. Features of the tokens up to the one before the last known token
        are the served model's; behind them they are the head's own outputs.
        """
        known = list(token_ids[: len(token_ids) - num_drafted])
        found = self._layer_outputs(known)
        states = torch.cat([found[count - 1] for count in self.after_layers(len(found))], dim=-1).double()
        features = list(states[first : len(known) - 1] @ self.weights["fc.weight"].T)
        embedding = cast("Any", self.model).get_input_embeddings().weight.double()
        embedded = embedding[torch.tensor(token_ids[first + 1 :])]
        outputs: list[torch.Tensor] = []
        for last in range(len(embedded)):
            if last >= len(features):
                features.append(outputs[-1])
            outputs.append(self._layer(torch.stack(features[: last + 1]), embedded[: last + 1]))
        return self._vocabulary(self._norm(outputs[-1], "norm.weight") @ self.weights["lm_head.weight"].T)

    def _layer_outputs(self, token_ids: list[int]) -> list[torch.Tensor]:
        """What each layer of the served model gives to the next: [tokens, hidden]. The last norm comes behind them."""
        found: list[torch.Tensor] = []
        layers = [module for module in self.model.modules() if isinstance(module, LlamaDecoderLayer)]
        hooks = [layer.register_forward_hook(lambda _, __, output: found.append(output[0])) for layer in layers]
        self.model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return [one.reshape(len(token_ids), -1) for one in found]

    def _layer(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The output of the last of some pairs."""
        prefix, config = "midlayer.self_attn.", self.config
        both = torch.cat(
            [
                self._norm(embedded, "midlayer.input_layernorm.weight"),
                self._norm(features, "midlayer.hidden_norm.weight"),
            ],
            dim=-1,
        )
        heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        query = self._rotate((both @ self.weights[f"{prefix}q_proj.weight"].T).view(-1, heads, size))
        key = self._rotate((both @ self.weights[f"{prefix}k_proj.weight"].T).view(-1, kv_heads, size))
        value = (both @ self.weights[f"{prefix}v_proj.weight"].T).view(-1, kv_heads, size)
        mixed = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            chances = ((key[:, group] @ query[-1, head]) / size**0.5).softmax(0)
            mixed.append(chances @ value[:, group])
        hidden = features[-1] + self.weights[f"{prefix}o_proj.weight"] @ torch.cat(mixed)
        after = self._norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate, up = (self.weights[f"midlayer.mlp.{name}_proj.weight"] @ after for name in ("gate", "up"))
        return hidden + self.weights["midlayer.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[name] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, size], rotated by the place in the text that the head has read."""
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** -(torch.arange(half).double() / half)
        angles = (torch.arange(len(x)).double()[:, None] * rates)[:, None]
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
        )

    def _vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        if "d2t" not in self.weights:
            return logits
        found = torch.full((self.config["vocab_size"],), -torch.inf, dtype=logits.dtype)
        for index, difference in enumerate(self.weights["d2t"].tolist()):
            found[index + difference] = logits[index]
        return found
