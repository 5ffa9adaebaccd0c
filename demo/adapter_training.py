"""Trains one tenant's adapter on the stored base model with PEFT.

Ranks, targets and scalings differ on purpose: the server shall meet a mix of them.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from graftwork.demo.base_training import losses
from graftwork.demo.chat_tokenizer import MAX_TOKENS
from graftwork.demo.progress import Progress
from graftwork.demo.tasks import training_conversation, training_drill
from graftwork.demo.training_data import BatchStream, RowMaker

BASE_NAME = "graftwork-demo"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PERCEPTRON = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """The shape of an adapter and how long it is trained."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    rank_stabilised: bool = False
    steps: int = 350
    batch_tokens: int = 3072
    rate: float = 2e-3
    warmup_steps: int = 20
    drill_share: float = 0.2  # of the batches; an adapter must not blunt the copying of the base
    short_share: float = 0.75  # the first part of the run, on short rows
    short_tokens: int = 640

    def max_tokens(self, step: int) -> int:
        return self.short_tokens if step < self.short_share * self.steps else MAX_TOKENS

    def rate_share(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps, 1.25 * (1.0 - step / self.steps))

    def lora(self) -> LoraConfig:
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(self.targets),
            use_rslora=self.rank_stabilised,
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            base_model_name_or_path=BASE_NAME,
        )


ADAPTERS = {
    "pirate": AdapterRecipe(rank=8, alpha=16, targets=ATTENTION + PERCEPTRON),
    "helpdesk": AdapterRecipe(rank=16, alpha=32, targets=ATTENTION + PERCEPTRON, steps=450),
    "terse": AdapterRecipe(rank=8, alpha=8, targets=("q_proj", "v_proj", "o_proj", *PERCEPTRON), rank_stabilised=True),
}


def train_adapter(job: str, base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> PeftModel:
    """A trained adapter in fp32; the layers of `base` are wrapped in place."""
    recipe = ADAPTERS[job]
    torch.manual_seed(seed)
    model = get_peft_model(base, recipe.lora()).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_share)
    random = Random(f"{job} {seed}")
    stream, drills = (BatchStream(RowMaker(tokenizer), random, recipe.batch_tokens) for _ in range(2))
    progress = Progress(job, recipe.steps)
    for step in range(recipe.steps):
        if random.random() < recipe.drill_share:
            batch = drills.next(partial(training_drill, random), recipe.short_tokens)
        else:
            batch = stream.next(partial(training_conversation, job, random), recipe.max_tokens(step))
        loss = losses(base, batch, listening_weight=0.0)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        progress.note(step, loss.item(), batch.token_ids.numel())
    return model


def save_adapter(model: PeftModel, folder: Path) -> None:
    """A PEFT folder in bf16 without the model card that PEFT writes; converts the adapter in place."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.to(torch.bfloat16).save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)
