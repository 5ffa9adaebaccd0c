"""Trains the demo's base model from scratch: a small Llama, Muon on the matrices, AdamW on the rest.

The recipe counts steps, not time, so that a seed gives the same run on any machine of the same arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graftwork.demo.chat_tokenizer import MAX_TOKENS
from graftwork.demo.muon import Muon
from graftwork.demo.progress import Progress
from graftwork.demo.tasks import training_conversation, training_drill
from graftwork.demo.training_data import Batch, Mixture, RowMaker
from graftwork.demo.vocabulary_drill import VocabularyDrill


@dataclass(frozen=True, slots=True)
class Stage:
    """From the share `starts_at` of the run on, conversations have up to this many tokens and tools."""

    starts_at: float
    max_tokens: int
    max_tools: int


@dataclass(frozen=True, slots=True)
class BaseRecipe:
    """How the base model is trained; stages grow, because copying is learned sooner on short rows."""

    steps: int = 4200
    batch_tokens: int = 3072
    warmup_steps: int = 60
    muon_rate: float = 0.015
    adam_rate: float = 3e-3
    decay_share: float = 0.7  # the last part of the run, over which the rates fall to zero
    shares: tuple[float, float, float] = (0.6, 0.2, 0.2)  # of the batches: conversations, drills, vocabulary drills
    drill_tokens: int = 320
    listening_share: float = 0.2  # the first part of the run, in which all tokens count a little
    listening_weight: float = 0.2
    stages: tuple[Stage, ...] = (
        Stage(0.0, 384, 2),
        Stage(0.35, 640, 4),
        Stage(0.5, 640, 8),
        Stage(0.7, 1024, 8),
        Stage(0.85, MAX_TOKENS, 8),
    )

    practice: bool = False
    """Whether the conversations hold more of what is hard (see Lexicon)."""

    def stage(self, step: int) -> Stage:
        return [stage for stage in self.stages if stage.starts_at <= step / self.steps][-1]


POLISH = BaseRecipe(
    steps=1000,
    muon_rate=0.004,
    adam_rate=8e-4,
    decay_share=1.0,
    shares=(0.8, 0.1, 0.1),
    listening_share=0.0,
    stages=(Stage(0.0, 640, 8), Stage(0.6, 1024, 8), Stage(0.8, MAX_TOKENS, 8)),
    practice=True,
)
"""A second, gentler course over what the first one leaves uncertain."""

FINISH = replace(
    POLISH,
    steps=900,
    muon_rate=0.003,
    adam_rate=6e-4,
    stages=(Stage(0.0, 320, 3), Stage(0.75, 1024, 8), Stage(0.9, MAX_TOKENS, 8)),
)
"""A third one over short conversations, which hold twice as many calls in a batch."""


COURSES = {"polish": POLISH, "finish": FINISH}


def base_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh model from torch's global seed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def losses(model: LlamaForCausalLM, batch: Batch, listening_weight: float) -> Tensor:
    """Mean loss over what the assistant says, plus a share of that over everything else.

    Only the labelled positions pass the output layer.
    """
    hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state  # [rows, tokens, hidden]
    hidden, targets = hidden[:, :-1], batch.token_ids[:, 1:]
    spoken = batch.spoken[:, 1:]
    loss = label_loss(model, hidden[spoken], targets[spoken])
    if listening_weight:
        heard = ~spoken & ~batch.padding[:, 1:]
        loss = loss + listening_weight * label_loss(model, hidden[heard], targets[heard])
    return loss


def label_loss(model: LlamaForCausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(model.lm_head(hidden), targets)


def optimizers(model: LlamaForCausalLM, recipe: BaseRecipe) -> list[torch.optim.Optimizer]:
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "layers" in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "layers" not in name]
    return [
        Muon(matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_share(step: int, recipe: BaseRecipe) -> float:
    """Share of the peak rate: warm-up, plateau, then a straight line to zero."""
    left = (recipe.steps - step) / (recipe.decay_share * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup_steps, left)


def train_base(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    recipe: BaseRecipe,
    checkpoint: Callable[[LlamaForCausalLM, int], None],
) -> LlamaForCausalLM:
    """The trained model in fp32; `checkpoint` is called after every step with the model as it stands."""
    torch.manual_seed(seed)
    return train(base_model(tokenizer), tokenizer, Random(f"base {seed}"), recipe, checkpoint)


def polish_base(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, course: str, seed: int
) -> LlamaForCausalLM:
    """The stored base after one of the later courses."""
    return train(model.train(), tokenizer, Random(f"{course} {seed}"), COURSES[course], lambda model, step: None)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    random: Random,
    recipe: BaseRecipe,
    checkpoint: Callable[[LlamaForCausalLM, int], None],
) -> LlamaForCausalLM:
    """One course over all weights, in place."""
    maker = RowMaker(tokenizer)
    vocabulary = VocabularyDrill(maker)
    mixture = Mixture(maker, random, recipe.batch_tokens, recipe.shares)
    parts = optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(part, lambda step: rate_share(step, recipe)) for part in parts]
    progress = Progress("base", recipe.steps)
    for step in range(recipe.steps):
        stage = recipe.stage(step)
        draws = (
            lambda: maker.row(
                training_conversation("base", random, stage.max_tools, practice=recipe.practice),  # noqa: B023
                stage.max_tokens,  # noqa: B023
            ),
            lambda: maker.row(training_drill(random), recipe.drill_tokens),
            lambda: vocabulary.row(random, recipe.drill_tokens),
        )
        batch = mixture.next(draws)
        listens = step < recipe.listening_share * recipe.steps
        loss = losses(model, batch, recipe.listening_weight if listens else 0.0)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part, schedule in zip(parts, schedules, strict=True):
            part.step()
            schedule.step()
            part.zero_grad(set_to_none=True)
        progress.note(step, loss.item(), batch.token_ids.numel())
        checkpoint(model, step)
    return model
