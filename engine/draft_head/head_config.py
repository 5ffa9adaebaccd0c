"""Reads the config.json of a draft head: an EAGLE-3 head, which guesses a model's next tokens from its hidden states.

The head is one decoder layer of Llama with a projection before it. Its input is the model's hidden states after three of
its layers. Never reads the weights: head_weights.py does. Never ignores a setting that may change what the head computes.
Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840), in the form that its authors, SpecForge and AngelSlim publish.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graftwork.engine.model.config import ModelConfig, parse_model_config, read_config_json
from graftwork.engine.model.settings import refused, whole
from graftwork.platform.errors import InvalidRequest

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""The names under which heads of this form are published. The authors' own files have the last one."""
_OWN_SETTINGS = ("architectures", "draft_vocab_size", "target_hidden_size", "eagle_config", "modeling_type")
_NUM_STATES = 3


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The sizes and settings of a draft head for one served model."""

    layer: ModelConfig
    """Those of its decoder layer, as of a Llama of one layer. Vocabulary and context are those of the served model: heads
    are trained on short texts, and what they were trained with is no limit.
    """
    target_hidden_size: int
    """The size of the served model's hidden states."""
    draft_vocab_size: int
    """The number of tokens that the head can guess."""
    after_layers: tuple[int, ...]
    """After how many layers of the served model its hidden states are read. 0 would be the embedding."""

    @property
    def states_width(self) -> int:
        """The features that the head reads of one token."""
        return len(self.after_layers) * self.target_hidden_size


def read_head_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Reads the configuration of a draft head for the served model `target`.

    Raises InvalidRequest if it is not served, or belongs to another model.
    """
    try:
        return _read_head_config(folder, target)
    except InvalidRequest as error:
        raise head_refused(folder, error.message) from error


def head_refused(folder: Path, problem: str) -> InvalidRequest:
    """Returns the error for a draft head that is not served."""
    return InvalidRequest(f"The draft head {folder} is not served: {problem}", param="draft_head")


def _read_head_config(folder: Path, target: ModelConfig) -> HeadConfig:
    found = read_config_json(folder)
    _check_form(found)
    layer = parse_model_config(_as_llama(found), folder)
    config = HeadConfig(
        layer=replace(layer, context_tokens=target.context_tokens),
        target_hidden_size=_size(found, "target_hidden_size", layer.hidden_size),
        draft_vocab_size=_size(found, "draft_vocab_size", layer.vocab_size),
        after_layers=_after_layers(found, target.num_layers),
    )
    _check_target(config, target)
    return config


def _check_form(found: dict[str, Any]) -> None:
    """Raises InvalidRequest if this is no head of EAGLE-3."""
    names = found.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise refused(f"architectures {names} is no draft head; served is EAGLE-3 as {', '.join(_ARCHITECTURES)}.")
    if "draft_vocab_size" not in found:
        raise refused("draft_vocab_size is missing: this is no EAGLE-3 head, and --draft-head takes no other.")
    if found.get("num_hidden_layers") != 1:
        raise refused(
            f"num_hidden_layers {found.get('num_hidden_layers')!r} is not served: a draft head has one layer."
        )
    options = found.get("eagle_config") or {}
    if not isinstance(options, dict) or options.keys() - {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"}:
        raise refused(f"eagle_config {options!r} has a setting that is not known.")
    if options.get("use_aux_hidden_state", True) is not True:
        raise refused("use_aux_hidden_state must be true: a head that reads the last hidden state alone is not served.")


def _as_llama(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the head's layer as those of a Llama."""
    rest = {name: value for name, value in found.items() if name not in _OWN_SETTINGS}
    return rest | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}


def _size(found: dict[str, Any], name: str, default: int) -> int:
    return default if found.get(name) is None else whole(found, name)


def _after_layers(found: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns after how many layers of the served model its hidden states are read.

    A head that says nothing reads the inputs of the layers 2, n/2 and n-3 of n, counted from 0, as in the paper's code.
    `eagle_aux_hidden_state_layer_ids` counts the layers themselves from 0: the head reads their outputs.
    """
    ids = (found.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        after = [2, num_layers // 2, num_layers - 3]
    elif isinstance(ids, list) and all(isinstance(one, int) for one in ids):
        after = [one + 1 for one in ids]
    else:
        raise refused(f"eagle_aux_hidden_state_layer_ids must be a list of layers, not {ids!r}.")
    if len(after) != _NUM_STATES or sorted(set(after)) != after or after[0] < 1 or after[-1] > num_layers:
        raise refused(
            f"the head reads hidden states after {after} layers, and the served model has {num_layers}: "
            "it belongs to another model."
        )
    return tuple(after)


def _check_target(config: HeadConfig, target: ModelConfig) -> None:
    pairs = {
        "hidden states": (config.target_hidden_size, target.hidden_size),
        "vocabulary": (config.layer.vocab_size, target.vocab_size),
    }
    for name, (own, served) in pairs.items():
        if own != served:
            raise refused(f"its {name} are of {own} and those of the served model of {served}: it belongs to another.")
    if config.draft_vocab_size > config.layer.vocab_size:
        raise refused(f"draft_vocab_size {config.draft_vocab_size} is above the vocabulary of {target.vocab_size}.")
