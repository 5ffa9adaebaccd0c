"""Quantised models with several residual streams: rounded at load, in the published forms, and inside a model that sees."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

from tests.engine.families import ALTERNATING, GEMMA3N, Family, load_model, make_adapter, make_family
from tests.engine.quantization.checkpoints import FORMS, Checkpoint, change_config, write
from tests.engine.quantization.test_experts import rounded_values
from tests.engine.quantization.test_served import PROMPTS, check
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 32,
    "num_hidden_layers": 3,
    "layer_types": ALTERNATING,
    "vocab_size_per_layer_input": 97,
}
MODEL = Gemma3nTextConfig(
    **GEMMA3N | SIZES,
    sliding_window=6,
    num_kv_shared_layers=1,
    altup_num_inputs=2,
    activation_sparsity_pattern=[0.5, 0.0, 0.0],
)
NARROW = ("modality_router", "prediction_coefs", "correction_coefs")
BESIDE = ("altup_projections.0", "altup_unembed_projections.0", "per_layer_model_projection")
EXCLUDED = {
    "gptq": "modules_to_not_convert",
    "packed int4": "ignore",
    "int8 W8A8": "ignore",
    "fp8 blocks": "ignored_layers",
}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    return make_family(MODEL, tmp_path_factory.mktemp("plain"), ())


@pytest.fixture(scope="module")
def made_of(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], Checkpoint]:
    """Returns a function that writes the model in a form, but for layers of some names, which stay plain."""

    def make(name: str, plain: tuple[str, ...]) -> Checkpoint:
        form = FORMS[name]
        made = write(form, family.folder, tmp_path_factory.mktemp("form"), skip=plain)
        field = EXCLUDED[name]
        change_config(made.folder, quantization_config=form.config | {field: [*(form.config.get(field) or ()), *plain]})
        return made

    return cache(make)


CASES = [
    ("packed int4", NARROW),
    ("packed int4", (*NARROW, *BESIDE)),
    ("int8 W8A8", ()),
    ("fp8 blocks", ()),
]


@pytest.mark.parametrize(("name", "plain"), CASES)
def test_tokens_and_probabilities_are_those_of_the_dense_weights(
    made_of: Callable[[str, tuple[str, ...]], Checkpoint], name: str, plain: tuple[str, ...]
) -> None:
    """Each layer may be quantised or plain, those that mix streams and those beside the layers too: transformers expects
    the same tokens by the dense weights."""
    made = made_of(name, plain)
    reference = AutoModelForCausalLM.from_pretrained(made.dense_folder, dtype=torch.float32)
    driver = Family(made.folder, {}).engine()

    outcomes = [driver.submit(prompt, ignore_eos=True, logprobs=0) for prompt in PROMPTS]
    driver.finish()

    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        check(outcome, prompt, reference, 1e-4 if name == "fp8 blocks" else 0.05)


def test_an_adapter_of_all_linear_layers_works_on_codes(
    made_of: Callable[[str, tuple[str, ...]], Checkpoint], tmp_path: Path
) -> None:
    """DoRA on all linear layers expects the tokens of PEFT on the dense weights."""
    made = made_of("fp8 blocks", ())
    shutil.copytree(made.folder, tmp_path / "base")
    options = {"r": 4, "use_dora": True, "target_modules": "all-linear"}
    reference = make_adapter(made.dense_folder, tmp_path / "adapters" / "dora", **options)
    driver = Family(tmp_path / "base", {}).engine()

    outcome = driver.run(PROMPTS[1], adapter="dora", ignore_eos=True, logprobs=0)

    check(outcome, PROMPTS[1], reference, 1e-4)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4", 4)])
def test_weights_are_rounded_at_load(family: Family, quantization: str, bits: int) -> None:
    """--quantization rounds all linear layers but those that mix streams within a layer: the logits are those of
    transformers with the rounded weights."""
    model = load_model(family.folder)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", *NARROW)):
                group = module.in_features if bits == 8 else {96: 32}.get(module.in_features, module.in_features)
                module.weight.copy_(rounded_values(module.weight, bits, group))
    rounded = Family(family.folder, {None: model.requires_grad_(False).train(False)})
    driver = rounded.engine(quantization=quantization, max_batch_tokens=7)
    recorder = recorded(driver)
    prompt = random_prompt(Random(3), 17)

    driver.run(prompt, max_tokens=4, ignore_eos=True)

    assert len(recorder.rows) == 4
    check_rows(recorder, driver, rounded, dict.fromkeys(driver.outcomes, (prompt, None)))


def test_neighbours_do_not_change_probabilities(family: Family) -> None:
    """The log probabilities of a request have the same bits alone and beside others."""
    driver = family.engine(quantization="int4", dtype="bfloat16", max_draft_tokens=0)
    alone = driver.run(PROMPTS[1], ignore_eos=True, logprobs=0, max_tokens=8, domain=b"alone")
    crowd = [driver.submit(PROMPTS[1], ignore_eos=True, logprobs=0, max_tokens=8, domain=b"%d" % n) for n in range(5)]
    driver.finish()

    for outcome in crowd:
        assert [row.logprob for row in outcome.logprobs] == [row.logprob for row in alone.logprobs]


def test_layers_that_a_library_leaves_plain_without_a_word_are_plain(family: Family, tmp_path: Path) -> None:
    """GPTQ quantises attention and MLP alone: the other layers are what the file holds, which nothing names."""
    form = FORMS["gptq"]
    others = ("linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection", *NARROW, *BESIDE)
    made = write(form, family.folder, tmp_path, skip=others)
    reference = AutoModelForCausalLM.from_pretrained(made.dense_folder, dtype=torch.float32)

    outcome = Family(made.folder, {}).engine().run(PROMPTS[1], ignore_eos=True, logprobs=0)

    check(outcome, PROMPTS[1], reference, 0.05)


def wrapped(folder: Path, target: Path) -> None:
    """Writes a quantised language model as part of one that sees, whose other parts are plain."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    inner["model.vision_tower.timm_model.conv.weight"] = torch.ones(3, 5)
    save_file(inner, target / "model.safetensors", {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())
    quantization = text.pop("quantization_config")
    quantization["ignore"] = ["lm_head", r"re:.*vision_tower.*", *(f"model.language_model.{name}" for name in BESIDE)]
    quantization["ignore"] += [f"model.language_model.layers.{layer}.self_attn.o_proj" for layer in range(3)]
    quantization["ignore"] += [
        f"model.language_model.layers.{layer}.altup.{name}" for layer in range(3) for name in NARROW
    ]
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "vision_config": {"a": 1}}
    (target / "config.json").write_text(json.dumps(outer | {"text_config": text, "quantization_config": quantization}))


def test_a_quantised_language_model_is_served_out_of_one_that_sees(
    made_of: Callable[[str, tuple[str, ...]], Checkpoint], tmp_path: Path
) -> None:
    """The names in its quantization_config are those of the whole model; the answers are those of the language model."""
    made = made_of("packed int4", (*NARROW, *BESIDE, "o_proj"))
    wrapped(made.folder, tmp_path / "whole")

    outcomes = [
        Family(folder, {}).engine().run(PROMPTS[1], ignore_eos=True, logprobs=0, max_tokens=6)
        for folder in (made.folder, tmp_path / "whole")
    ]

    assert outcomes[0].token_ids == outcomes[1].token_ids
    assert [row.logprob for row in outcomes[0].logprobs] == [row.logprob for row in outcomes[1].logprobs]
