"""Trains one tenant's adapter on the stored base model with PEFT.

Ranks, targets and scalings differ on purpose: the server shall meet a mix of them.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from graftwork.demo.base_training import Stage, losses
from graftwork.demo.chat_tokenizer import MAX_TOKENS
from graftwork.demo.model_folder import amend
from graftwork.demo.progress import Progress
from graftwork.demo.tasks import training_conversation, training_drill
from graftwork.demo.training_data import Mixture, RowMaker
from graftwork.demo.vocabulary_drill import VocabularyDrill

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
    steps: int = 1100
    batch_tokens: int = 2048
    rate: float = 3e-3
    warmup_steps: int = 20
    shares: tuple[float, float, float] = (0.76, 0.12, 0.12)  # conversations, and two drills to keep the base's copying
    drill_tokens: int = 320
    stages: tuple[Stage, ...] = (Stage(0.0, 384, 3), Stage(0.4, 768, 8), Stage(0.75, MAX_TOKENS, 8))

    def stage(self, step: int) -> Stage:
        return [stage for stage in self.stages if stage.starts_at <= step / self.steps][-1]

    def rate_share(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps, 1.1 * (1.0 - step / self.steps))

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
    "helpdesk": AdapterRecipe(rank=16, alpha=32, targets=ATTENTION + PERCEPTRON, steps=1800),
    "terse": AdapterRecipe(
        rank=8, alpha=8, targets=("q_proj", "v_proj", "o_proj", *PERCEPTRON), rank_stabilised=True, steps=900
    ),
}


def train_adapter(job: str, base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> PeftModel:
    """A trained adapter in fp32; the layers of `base` are wrapped in place."""
    recipe = ADAPTERS[job]
    torch.manual_seed(seed)
    base.name_or_path = BASE_NAME  # else PEFT records the folder
    model = get_peft_model(base, recipe.lora()).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.rate_share)
    random = Random(f"{job} {seed}")
    maker = RowMaker(tokenizer)
    vocabulary = VocabularyDrill(maker)
    mixture = Mixture(maker, random, recipe.batch_tokens, recipe.shares)
    progress = Progress(job, recipe.steps)
    for step in range(recipe.steps):
        stage = recipe.stage(step)
        draws = (
            lambda: maker.row(training_conversation(job, random, stage.max_tools, practice=True), stage.max_tokens),  # noqa: B023
            lambda: maker.row(training_drill(random), recipe.drill_tokens),
            lambda: vocabulary.row(random, recipe.drill_tokens),
        )
        batch = mixture.next(draws)
        loss = losses(base, batch, listening_weight=0.0)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        progress.note(step, loss.item(), batch.token_ids.numel())
    return model


def targets_of(model: PeftModel) -> set[str]:
    lora = model.peft_config["default"]
    assert isinstance(lora, LoraConfig)
    return set(lora.target_modules or ())


def save_adapter(model: PeftModel, folder: Path) -> None:
    """A PEFT folder in bf16 without the model card that PEFT writes; converts the adapter in place."""
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.to(torch.bfloat16).save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "adapter_model.safetensors").chmod(0o644)
    amend(folder / "adapter_config.json", {"target_modules": sorted(targets_of(model))})
