"""Engines serve quantised bases: as transformers computes the dense weights, with adapters of every kind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.model.config import read_model_config
from graftwork.engine.model.fingerprint import fingerprint
from graftwork.engine.model.weights import open_weights
from graftwork.platform.errors import InvalidRequest
from tests.engine.adapter_kinds import AdapterKinds, make_adapter_kinds
from tests.engine.engine_driver import EngineDriver, Outcome
from tests.engine.parallel.rank_threads import start_thread
from tests.engine.quantization.checkpoints import FORMS, Checkpoint, change_config, gptq, make_joined, make_plain, write

CheckpointOf = Callable[[str], Checkpoint]
PROMPTS = [[5, 17, 40, 8, 33], [9, 3, 77, 61, 2, 50, 41, 12, 90], [64]]
SETTINGS: dict[str, Any] = {"dtype": "float32", "page_tokens": 4, "device_bytes": 4 * 2**20}


def engine(folder: Path, **options: Any) -> EngineDriver:
    config = EngineConfig(model=folder, **SETTINGS | options)
    return EngineDriver(build_engine(config, lambda _: AdapterKinds(folder, {}, {}), start_worker=start_thread))


def check(outcome: Outcome, prompt: list[int], model: torch.nn.Module, close: float) -> None:
    """Checks an answer against a reference model that reads prompt and answer.

    Each token must be the likeliest, but for a tie within `close`, and its log probability the reference's.
    """
    assert outcome.error is None
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + outcome.token_ids])).logits[0, len(prompt) - 1 : -1].log_softmax(1)
    for row, token, logprobs in zip(rows, outcome.token_ids, outcome.logprobs, strict=True):
        assert row[token] >= row.max() - close
        assert abs(logprobs.logprob - float(row[token])) <= close


def is_exact(name: str) -> bool:
    """Returns whether a form's scales are fp32, so that its library rounds no product of a code and a scale."""
    return name in ("fp8 blocks", "fp8 tensor, static")


@pytest.mark.parametrize("name", FORMS)
def test_tokens_and_probabilities_are_those_of_the_dense_weights(name: str, checkpoint_of: CheckpointOf) -> None:
    """A quantised base expects after each token what its dense weights expect in transformers.

    Libraries round each weight to the dtype of its scale, fp16 or bf16. Prompts have the same weights bit by bit; the
    kernel of decoding rows rounds nothing.
    """
    made = checkpoint_of(name)
    reference = AutoModelForCausalLM.from_pretrained(made.dense_folder, dtype=torch.float32)
    driver = engine(made.folder)

    outcomes = [driver.submit(prompt, ignore_eos=True, logprobs=0) for prompt in PROMPTS]
    driver.finish()

    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        check(outcome, prompt, reference, 1e-4 if is_exact(name) else 0.05)


@pytest.fixture(scope="module")
def adapted(checkpoint_of: CheckpointOf) -> AdapterKinds:
    """Adapters of every kind on the dense weights of a GPTQ checkpoint, in PEFT."""
    return make_adapter_kinds(checkpoint_of("gptq desc_act").dense_folder)


def test_adapters_of_every_kind_work_on_a_quantised_base(adapted: AdapterKinds, checkpoint_of: CheckpointOf) -> None:
    """One batch with an adapter of every kind on a GPTQ base equals PEFT on its dense weights, row by row."""
    kinds = replace(adapted, base=checkpoint_of("gptq desc_act").folder)
    driver = kinds.engine(device_bytes=16 * 2**20)

    outcomes = {
        name: driver.submit(PROMPTS[1], adapter=name or None, ignore_eos=True, logprobs=0) for name in kinds.models
    }
    driver.finish()

    for name, outcome in outcomes.items():
        check(outcome, PROMPTS[1], kinds.models[name], 0.05)


@pytest.mark.parametrize("name", ["gptq", "packed int4 with zero points", "fp8 blocks", "int8 W8A8"])
def test_two_devices_compute_what_one_does(name: str, checkpoint_of: CheckpointOf) -> None:
    """Tensor parallelism divides a quantised base without changing its tokens."""
    made = checkpoint_of(name)
    alone, together = engine(made.folder), engine(made.folder, tensor_parallel=2)

    try:
        for prompt in PROMPTS:
            tokens = [driver.run(prompt, ignore_eos=True).token_ids for driver in (alone, together)]
            assert tokens[0] == tokens[1]
    finally:
        together.close()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_two_devices_round_as_one_does(name: str, tmp_path: Path) -> None:
    """Each device has its part of the weights that one device would round."""
    plain = make_plain(tmp_path / "wide", intermediate_size=256)
    alone, together = engine(plain, quantization=name), engine(plain, quantization=name, tensor_parallel=2)

    try:
        for prompt in PROMPTS:
            tokens = [driver.run(prompt, ignore_eos=True).token_ids for driver in (alone, together)]
            assert tokens[0] == tokens[1]
    finally:
        together.close()


def test_sorted_columns_are_not_divided(checkpoint_of: CheckpointOf) -> None:
    """A checkpoint with desc_act is refused on two devices, because its columns are sorted."""
    with pytest.raises(InvalidRequest, match=r"--tensor-parallel 2 divides .*o_proj within a group"):
        engine(checkpoint_of("gptq desc_act").folder, tensor_parallel=2)


def test_a_quantised_checkpoint_is_not_rounded_again(checkpoint_of: CheckpointOf) -> None:
    """The setting `quantization` is refused for a checkpoint that is quantised."""
    with pytest.raises(InvalidRequest, match=r"quantised already \(awq\): leave --quantization out"):
        engine(checkpoint_of("awq").folder, quantization="int8")


def test_rounded_weights_are_another_model(plain: Path) -> None:
    """Rounding at load changes the model's fingerprint, so no cache or fleet takes one for the other."""
    names = {fingerprint(plain), fingerprint(plain, "int8"), fingerprint(plain, "int4")}

    assert len(names) == 3
    assert engine(plain, quantization="int8").engine.description.fingerprint in names - {fingerprint(plain)}


def test_neighbours_do_not_change_probabilities(plain: Path) -> None:
    """The log probabilities of a decoding request have the same bits alone and beside others."""
    driver = engine(plain, quantization="int4", dtype="bfloat16", max_draft_tokens=0)
    alone = driver.run(PROMPTS[2], ignore_eos=True, logprobs=0, max_tokens=12, domain=b"alone")
    crowd = [driver.submit(PROMPTS[2], ignore_eos=True, logprobs=0, max_tokens=12, domain=b"%d" % n) for n in range(9)]
    driver.finish()

    for outcome in crowd:
        assert [row.logprob for row in outcome.logprobs] == [row.logprob for row in alone.logprobs]


def test_a_bias_joins_the_products(tmp_path: Path) -> None:
    """A bias of the model joins the products of quantised weights."""
    biased = make_plain(tmp_path / "biased", attention_bias=True)
    made = write(gptq(), biased, tmp_path / "form")
    reference = AutoModelForCausalLM.from_pretrained(made.dense_folder, dtype=torch.float32)

    check(engine(made.folder).run(PROMPTS[0], ignore_eos=True, logprobs=0), PROMPTS[0], reference, 0.05)


@pytest.mark.parametrize("name", ["gptq", "fp8 channels"])
def test_joined_projections_are_read_from_one_quantised_tensor(name: str, tmp_path: Path) -> None:
    """A quantised `qkv_proj` and `gate_up_proj`, as Phi-3 has them, are read as their projections."""
    joined = make_joined(tmp_path / "phi")
    made = write(FORMS[name], joined, tmp_path / "form")
    reference = AutoModelForCausalLM.from_pretrained(made.dense_folder, dtype=torch.float32)

    for prompt in PROMPTS:
        check(engine(made.folder).run(prompt, ignore_eos=True, logprobs=0), prompt, reference, 0.05)


def test_a_joined_tensor_may_stay_plain(tmp_path: Path) -> None:
    """A joined layer that quantization_config excludes by its own name is read as plain projections."""
    form = gptq()
    made = write(form, make_joined(tmp_path / "phi"), tmp_path / "form", skip=("qkv_proj",))
    change_config(made.folder, quantization_config=form.config | {"modules_to_not_convert": ["qkv_proj"]})
    reference = AutoModelForCausalLM.from_pretrained(made.dense_folder, dtype=torch.float32)

    check(engine(made.folder).run(PROMPTS[1], ignore_eos=True, logprobs=0), PROMPTS[1], reference, 0.05)


def test_plain_tensors_are_split_as_before(tmp_path: Path) -> None:
    """Rounding at load reads the projections of a joined tensor one by one."""
    folder = make_joined(tmp_path / "phi")
    config = read_model_config(folder)

    assert engine(folder, quantization="int8").run(PROMPTS[0], ignore_eos=True).token_ids
    assert "model.layers.0.self_attn.k_proj.weight" in open_weights(folder, config)
