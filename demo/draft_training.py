"""Makes the demo's draft model: the first layers of the base, trained to say what the whole base would say next.

    python demo/draft_training.py [--layers 1] [--steps 600] [--folder demo/draft] [--seed 7]

The loss is the divergence from the base's own distribution after each token that the assistant says (distillation, as in
DistillSpec, Zhou et al. 2023). At the end it prints how often the likeliest token is the base's, on words that training
never used. One thread, no downloads; some two minutes on one core.
"""

import argparse
from pathlib import Path
from random import Random
from shutil import copyfile

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from graftwork.demo.base_training import POLISH, BaseRecipe, optimizers, rate_share
from graftwork.demo.conversations import draw_num_turns, write_conversation
from graftwork.demo.lexicon import Lexicon
from graftwork.demo.model_folder import (
    DEMO_FOLDER,
    MODEL_FOLDER,
    load_model,
    load_tokenizer,
    save_model,
)
from graftwork.demo.progress import Progress
from graftwork.demo.tasks import training_conversation, training_drill
from graftwork.demo.training_data import Batch, BatchStream, Mixture, RowMaker

DRAFT_FOLDER = DEMO_FOLDER / "draft"
RECIPE = BaseRecipe(steps=600, batch_tokens=2048, warmup_steps=20, muon_rate=0.01, adam_rate=2e-3)
SHARES = (0.85, 0.15)
MAX_ROW_TOKENS = 640
HELD_OUT_BATCHES = 24


def first_layers(base: LlamaForCausalLM, num_layers: int) -> LlamaForCausalLM:
    """A model of the base's embedding, its first layers and its last norm."""
    config = LlamaConfig(**base.config.to_dict() | {"num_hidden_layers": num_layers})
    model = LlamaForCausalLM(config)
    kept = model.state_dict().keys()
    model.load_state_dict({name: weight for name, weight in base.state_dict().items() if name in kept})
    return model


def spoken_logits(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """The logits of what the assistant says: [num_spoken, vocab]."""
    hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state[:, :-1]
    logits: Tensor = model.lm_head(hidden[batch.spoken[:, 1:]])
    return logits


def train_draft(
    base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, num_layers: int, steps: int, seed: int
) -> LlamaForCausalLM:
    """The trained draft model in fp32."""
    torch.manual_seed(seed)
    model, random, maker = first_layers(base, num_layers), Random(f"draft {seed}"), RowMaker(tokenizer)
    model.train()
    recipe = BaseRecipe(steps, RECIPE.batch_tokens, RECIPE.warmup_steps, RECIPE.muon_rate, RECIPE.adam_rate)
    mixture = Mixture(maker, random, recipe.batch_tokens, SHARES)
    parts = optimizers(model, recipe)
    schedules = [torch.optim.lr_scheduler.LambdaLR(part, lambda step: rate_share(step, recipe)) for part in parts]
    progress = Progress("draft", steps)
    for step in range(steps):
        draws = (
            lambda: maker.row(training_conversation("base", random, POLISH.stage(step).max_tools), MAX_ROW_TOKENS),  # noqa: B023
            lambda: maker.row(training_drill(random), recipe.drill_tokens),
        )
        batch = mixture.next(draws)
        with torch.no_grad():
            wanted = spoken_logits(base, batch).log_softmax(-1)
        loss = kl_div(spoken_logits(model, batch).log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part, schedule in zip(parts, schedules, strict=True):
            part.step()
            schedule.step()
            part.zero_grad(set_to_none=True)
        progress.note(step, loss.item(), batch.token_ids.numel())
    model.train(False)
    return model


@torch.no_grad()
def agreement(base: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """The share of positions at which the likeliest token is the same, in conversations over words never used."""
    random, maker = Random("held-out drafts"), RowMaker(tokenizer)
    words, stream = Lexicon(random, held_out=True), BatchStream(RowMaker(tokenizer), random, RECIPE.batch_tokens)
    same = total = 0
    for _ in range(HELD_OUT_BATCHES):
        batch = stream.next(lambda: maker.row(write_conversation("base", words, draw_num_turns(random)), 1024))
        found = spoken_logits(draft, batch).argmax(-1) == spoken_logits(base, batch).argmax(-1)
        same, total = same + int(found.sum()), total + len(found)
    return same / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=RECIPE.steps)
    parser.add_argument("--folder", type=Path, default=DRAFT_FOLDER)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on busy cores are far slower than one
    base, tokenizer = load_model(MODEL_FOLDER), load_tokenizer(MODEL_FOLDER)
    draft = train_draft(base, tokenizer, options.layers, options.steps, options.seed)
    print(f"draft: agrees with the base on {agreement(base, draft, tokenizer):.1%} of its tokens", flush=True)
    options.folder.mkdir(exist_ok=True)
    save_model(draft, options.folder)
    copyfile(MODEL_FOLDER / "tokenizer.json", options.folder / "tokenizer.json")


if __name__ == "__main__":
    main()
