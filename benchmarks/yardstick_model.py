"""The model and the adapters of the CPU yardstick: random, small, and the same for every engine.

They are made once into a cache folder. Values are rounded to bf16 before they are saved, so that an engine in bf16 and
an oracle in fp32 hold equal weights.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

VERSION = 1
"""To be raised with any change of what is made here: it names the folder."""
NUM_ADAPTERS = 16
VOCAB_SIZE = 8192
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_WEIGHT_STD = 0.05
_B_STD = 0.05
"""The deltas then have a fifth of the base weights' spread: wrong adapters cannot hide."""


@dataclass(frozen=True, slots=True)
class YardstickModel:
    """Where the files are."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def adapters(self) -> list[Path]:
        """PEFT folders by adapter index."""
        return [self.folder / "adapters" / f"{index:02}" for index in range(NUM_ADAPTERS)]


def rank_of(adapter: int) -> int:
    return 16 if adapter % 2 == 0 else 8


def ensure_model(cache: Path) -> YardstickModel:
    """Make the files, unless they are there; what an interruption leaves is made anew."""
    model = YardstickModel(cache / f"yardstick-{VERSION}")
    if not model.folder.is_dir():
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        staged = YardstickModel(cache / f"yardstick-{VERSION}.part")
        shutil.rmtree(staged.folder, ignore_errors=True)
        staged.folder.mkdir(parents=True)
        _make_base(staged.base)
        for index, folder in enumerate(staged.adapters):
            _make_adapter(staged.base, folder, index)
        staged.folder.rename(model.folder)
    return model


def _make_base(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=_WEIGHT_STD,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder)
    _make_tokenizer(folder)


def _make_tokenizer(folder: Path) -> None:
    """Bytes and the first pairs of bytes: some converters refuse a model without a tokenizer. Nothing is tokenized."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in letters for second in letters][: VOCAB_SIZE - len(letters)]
    tokens = [*letters, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0], "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _make_adapter(base: Path, folder: Path, index: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(1000 + index)
    rank = rank_of(index)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=_B_STD)
            if "lora_" in name:
                parameter.copy_(parameter.bfloat16().float())
    model.save_pretrained(str(folder))
