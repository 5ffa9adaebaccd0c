"""Makes the demo's draft head: an EAGLE-3 head that guesses the base's next tokens from its hidden states.

    python demo/head_training.py [--steps 500] [--folder demo/head] [--seed 7]

The loss is the divergence from the base's own distribution, over the guess of the next token but one and over two more
guesses that follow the head's own output, as it will be used (the training-time test of EAGLE-3, Li et al. 2025).
At the end it prints how often each guess is the base's likeliest token, on words that training never used, and writes the
files as heads are published. One thread, no downloads; some four minutes on one core.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import kl_div, silu
from transformers import LlamaForCausalLM

from graftwork.demo.base_training import POLISH
from graftwork.demo.conversations import draw_num_turns, write_conversation
from graftwork.demo.lexicon import Lexicon
from graftwork.demo.model_folder import DEMO_FOLDER, MODEL_FOLDER, load_model, load_tokenizer
from graftwork.demo.muon import Muon
from graftwork.demo.progress import Progress
from graftwork.demo.tasks import training_conversation, training_drill
from graftwork.demo.training_data import Batch, BatchStream, Mixture, RowMaker

HEAD_FOLDER = DEMO_FOLDER / "head"
DEPTH = 3
"""Guesses in a row that are trained."""
SHARES = (0.85, 0.15)
BATCH_TOKENS, MAX_ROW_TOKENS, DRILL_TOKENS = 2048, 384, 320
HELD_OUT_BATCHES = 16


class Norm(nn.Module):
    """RMS norm, as in Llama."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


class Attention(nn.Module):
    """Attention over pairs of an embedding and features, side by side."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.head_dim, self.theta, self.groups = head_dim, theta, heads // kv_heads

    def forward(self, x: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Computes one guess in a row. x: [rows, tokens, 2 * hidden], a token for each place from which guesses start.

        A place attends to the pairs before it that were made of the base's features, and to its own earlier guesses:
        `earlier` has their keys and values, one pair of tensors for each guess, and gets those of this one.
        """
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        depth, num_tokens = len(earlier), x.shape[1]
        query = self.rotated(query, depth)  # [rows, heads, tokens, head_dim]
        earlier.append((self.wide(self.rotated(key, depth)), self.wide(value)))
        first_keys, first_values = (one[:, :, :num_tokens] for one in earlier[0])
        scores = query @ first_keys.transpose(2, 3)  # [rows, heads, tokens, tokens]
        later = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        own = [(query * keys[:, :, :num_tokens]).sum(-1, keepdim=True) for keys, _ in earlier[1:]]
        chances = (torch.cat([scores.masked_fill(later, -torch.inf), *own], dim=-1) / self.head_dim**0.5).softmax(-1)
        mixed = chances[..., :num_tokens] @ first_values
        for place, (_, values) in enumerate(earlier[1:], start=num_tokens):
            mixed = mixed + chances[..., place : place + 1] * values[:, :, :num_tokens]
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def wide(self, x: Tensor) -> Tensor:
        """Gives each query head its key or value head: [rows, heads, tokens, head_dim]."""
        return x.repeat_interleave(self.groups, dim=1)

    def rotated(self, x: Tensor, depth: int) -> Tensor:
        """Rotates by positions from `depth` on."""
        half = self.head_dim // 2
        angles = torch.outer(
            torch.arange(x.shape[2], dtype=torch.float32) + depth,
            self.theta ** -(torch.arange(half, dtype=torch.float32) / half),
        )
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class MidLayer(nn.Module):
    """The head's one layer. The names of its parts are those of published files."""

    def __init__(self, base: LlamaForCausalLM) -> None:
        super().__init__()
        config: Any = base.config
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        theta = config.rope_parameters["rope_theta"]
        self.input_layernorm, self.hidden_norm = Norm(hidden, epsilon), Norm(hidden, epsilon)
        self.post_attention_layernorm = Norm(hidden, epsilon)
        self.self_attn = Attention(
            hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim, theta
        )
        self.mlp = Mlp(hidden, config.intermediate_size)

    def forward(self, embedded: Tensor, features: Tensor, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(both, earlier)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Head(nn.Module):
    """An EAGLE-3 head that can guess every token."""

    def __init__(self, base: LlamaForCausalLM) -> None:
        super().__init__()
        config = base.config
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(base)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight.data.copy_(base.lm_head.weight.data)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the head reads of a batch, and what it should say."""

    states: Tensor  # [rows, tokens, 3 * hidden]
    embedded: Tensor  # [rows, tokens, hidden]
    wanted: Tensor  # [rows, tokens, vocab] log probabilities after each token
    spoken: Tensor  # [rows, tokens] whether each token is the assistant's


@torch.no_grad()
def lesson(base: LlamaForCausalLM, batch: Batch) -> Lesson:
    found = base.model(input_ids=batch.token_ids, use_cache=False, output_hidden_states=True)
    states = torch.cat([found.hidden_states[count] for count in taps(base.config.num_hidden_layers)], dim=-1)
    wanted = base.lm_head(found.last_hidden_state).log_softmax(-1)
    return Lesson(states, base.model.embed_tokens(batch.token_ids), wanted, batch.spoken)


def taps(num_layers: int) -> tuple[int, int, int]:
    """After how many layers of the base its hidden states are read: after the first, in the middle, before the last.

    The paper's places, 2, n / 2 and n - 3, are for models of more than six layers.
    """
    return 1, num_layers // 2, num_layers - 1


def guesses(head: Head, own: Lesson) -> list[tuple[Tensor, Tensor]]:
    """For each guess in a row: the logits that the head gives, and the log probabilities that are wanted, where the
    assistant speaks: [num_spoken, vocab] each."""
    pairs: list[tuple[Tensor, Tensor]] = []
    features, earlier = head.fc(own.states), list[tuple[Tensor, Tensor]]()
    for depth in range(DEPTH):  # pair p of this depth joins features p and token p + 1 + depth
        embedded = own.embedded[:, 1 + depth :]
        features = head.midlayer(embedded, features[:, : embedded.shape[1]], earlier)
        wanted = own.wanted[:, 1 + depth :]
        counts = own.spoken[:, 2 + depth :]  # the token that is guessed
        logits = head.lm_head(head.norm(features[:, :-1][counts]))
        pairs.append((logits, wanted[:, :-1][counts]))
    return pairs


def train_head(base: LlamaForCausalLM, maker: RowMaker, steps: int, seed: int) -> Head:
    """The trained head in fp32."""
    torch.manual_seed(seed)
    head, random = Head(base), Random(f"head {seed}")
    mixture = Mixture(maker, random, BATCH_TOKENS, SHARES)
    layers = [weight for name, weight in head.named_parameters() if weight.ndim == 2 and "lm_head" not in name]
    others = [weight for name, weight in head.named_parameters() if weight.ndim != 2 or "lm_head" in name]
    optimizers = [Muon(layers, lr=0.012, weight_decay=0.01), torch.optim.AdamW(others, lr=2e-3, weight_decay=0.0)]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: min(1.0, (step + 1) / 20, 1.4 * (steps - step) / steps))
        for one in optimizers
    ]
    progress = Progress("head", steps)
    for step in range(steps):
        draws = (
            lambda: maker.row(training_conversation("base", random, POLISH.stage(step).max_tools), MAX_ROW_TOKENS),  # noqa: B023
            lambda: maker.row(training_drill(random), DRILL_TOKENS),
        )
        batch = mixture.next(draws)
        parts = [
            kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
            for logits, wanted in guesses(head, lesson(base, batch))
        ]
        loss = sum(0.8**depth * part for depth, part in enumerate(parts))
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        progress.note(step, parts[0].item(), batch.token_ids.numel())
    return head


@torch.no_grad()
def agreement(head: Head, base: LlamaForCausalLM, maker: RowMaker) -> list[float]:
    """The share of positions at which each guess in a row is the base's likeliest token, over words never used."""
    random = Random("held-out drafts")
    words, stream = Lexicon(random, held_out=True), BatchStream(maker, random, BATCH_TOKENS)
    same, total = [0] * DEPTH, [0] * DEPTH
    for _ in range(HELD_OUT_BATCHES):
        batch = stream.next(lambda: maker.row(write_conversation("base", words, draw_num_turns(random)), 1024))
        for depth, (logits, wanted) in enumerate(guesses(head, lesson(base, batch))):
            same[depth] += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
            total[depth] += len(logits)
    return [one / count for one, count in zip(same, total, strict=True)]


def save_head(head: Head, base: LlamaForCausalLM, folder: Path) -> None:
    """Writes the files of a published head: bf16, without the embedding, which is the base's."""
    folder.mkdir(exist_ok=True)
    tensors = {name: weight.bfloat16().contiguous() for name, weight in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    config = base.config
    names: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    names += ("rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters")
    settings = {name: getattr(config, name) for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [count - 1 for count in taps(config.num_hidden_layers)],
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=HEAD_FOLDER)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on busy cores are far slower than one
    base, maker = load_model(MODEL_FOLDER), RowMaker(load_tokenizer(MODEL_FOLDER))
    head = train_head(base, maker, options.steps, options.seed)
    save_head(head, base, options.folder)
    shares = ", ".join(f"{share:.1%}" for share in agreement(head, base, maker))
    print(f"head: guesses in a row agree with the base on {shares} of its tokens", flush=True)


if __name__ == "__main__":
    main()
