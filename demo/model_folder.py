"""Reading and writing the demo's Hugging Face folder: bf16 on disk, fp32 in training and evaluation."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO_FOLDER = Path(__file__).parent
MODEL_FOLDER = DEMO_FOLDER / "model"
ADAPTERS_FOLDER = DEMO_FOLDER / "adapters"


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    amend(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def amend(path: Path, settings: Mapping[str, object]) -> None:
    """Sets some names of a JSON file."""
    text = json.dumps(json.loads(path.read_text()) | settings, indent=2, ensure_ascii=False)
    path.write_text(text + "\n")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes bf16 weights; the model in memory keeps its own."""
    deepcopy(model).bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    amend(folder / "config.json", {"torch_dtype": "bfloat16"})  # where older readers look


def load_model(folder: Path) -> LlamaForCausalLM:
    """The stored weights in fp32, ready to evaluate."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    model.train(False)
    return model
