"""Makes the demo's model folder and adapters again, from nothing but a seed.

    python demo/build.py [--seed 7] [--only tokenizer base polish finish pirate helpdesk terse]

One thread, no downloads; about 45 minutes on one core with AVX-512.
The order is fixed: the base needs the tokenizer, its later courses the stored base, and the adapters the finished one.
"""

import argparse

import torch
from transformers import LlamaForCausalLM

from graftwork.demo.adapter_training import ADAPTERS, save_adapter, train_adapter
from graftwork.demo.base_training import COURSES, BaseRecipe, polish_base, train_base
from graftwork.demo.chat_tokenizer import train_tokenizer
from graftwork.demo.model_folder import (
    ADAPTERS_FOLDER,
    MODEL_FOLDER,
    load_model,
    load_tokenizer,
    save_model,
    save_tokenizer,
)

PARTS = ("tokenizer", "base", *COURSES, *ADAPTERS)
CHECKPOINT_EVERY = 250  # steps


def build_tokenizer(seed: int) -> None:
    print("tokenizer: learning merges", flush=True)
    save_tokenizer(train_tokenizer(seed), MODEL_FOLDER)


def build_base(seed: int) -> None:
    def checkpoint(model: LlamaForCausalLM, step: int) -> None:
        if (step + 1) % CHECKPOINT_EVERY == 0:
            save_model(model, MODEL_FOLDER)

    save_model(train_base(load_tokenizer(MODEL_FOLDER), seed, BaseRecipe(), checkpoint), MODEL_FOLDER)


def build_course(course: str, seed: int) -> None:
    tokenizer = load_tokenizer(MODEL_FOLDER)
    save_model(polish_base(load_model(MODEL_FOLDER), tokenizer, course, seed), MODEL_FOLDER)


def build_adapter(job: str, seed: int) -> None:
    model = train_adapter(job, load_model(MODEL_FOLDER), load_tokenizer(MODEL_FOLDER), seed)
    save_adapter(model, ADAPTERS_FOLDER / job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)  # two threads on busy cores are far slower than one
    MODEL_FOLDER.mkdir(exist_ok=True)
    for part in PARTS:
        if part not in options.only:
            continue
        if part == "tokenizer":
            build_tokenizer(options.seed)
        elif part == "base":
            build_base(options.seed)
        elif part in COURSES:
            build_course(part, options.seed)
        else:
            build_adapter(part, options.seed)


if __name__ == "__main__":
    main()
