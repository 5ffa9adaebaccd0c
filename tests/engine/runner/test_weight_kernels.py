"""Quantised models computed by Triton, with interpreted kernels, against transformers and peft."""

from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from graftwork.engine.core.requests import SessionKey, SessionUse
from graftwork.engine.core.session_commands import SessionVerb
from graftwork.platform.errors import InvalidRequest
from tests.engine.engine_driver import EngineDriver
from tests.engine.families import Family, load_model, make_adapter
from tests.engine.quantization.checkpoints import FORMS, make_plain, write
from tests.engine.runner.test_decoder_parity import random_prompt
from tests.engine.runner.test_model_families import check_rows, recorded
from tests.engine.runner.test_step_graphs import Recorder, differences, recorder, with_graphs

__all__ = ["recorder"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("engine_interprets_all"),
]
TRITON = dict.fromkeys(("attention_backend", "row_kernels", "lora_kernels", "weight_kernels"), "triton")
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj", "up_proj"]}


def family_of(form: str, folder: Path) -> Family:
    """A quantised checkpoint of one layer and an adapter on it, with the dense weights in transformers and peft."""
    torch.set_num_threads(1)
    made = write(FORMS[form], make_plain(folder / "plain", num_hidden_layers=1), folder / "form")
    base = made.dense_folder
    references: dict[str | None, torch.nn.Module] = {None: load_model(base).requires_grad_(False).train(False)}
    references["adapter"] = make_adapter(base, made.folder.parent / "adapters" / "adapter", **LORA)
    return Family(made.folder, references)


@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 tensor, static"])
def test_kernels_of_codes_and_around_them_equal_peft(tmp_path: Path, form: str) -> None:
    """Prompts in chunks, decoding rows and adapters have peft's logits on the dense weights."""
    family = family_of(form, tmp_path)
    driver = family.engine(max_batch_tokens=8, max_running=3, **TRITON)
    driver.warm("adapter")
    recorder, asked = recorded(driver), dict[Any, Any]()

    for number, adapter in enumerate(["adapter", None]):
        prompt = random_prompt(Random(number), 3 + 7 * number)
        driver.submit(prompt, adapter=adapter, max_tokens=2, ignore_eos=True)
        asked[list(driver.outcomes)[-1]] = (prompt, adapter)
    driver.finish()

    forward: Any = driver.engine.runner.forward
    assert all(linear.has_kernels for linear in forward.parts.decoder.weights.quantized_linears)
    assert len(recorder.rows) == 4
    check_rows(recorder, driver, family, asked)


@pytest.mark.usefixtures("rules_of_a_gpu")
def test_a_graph_of_codes_launches_the_same_in_each_step(
    tmp_path: Path, interpreted_engine: dict[str, ModuleType], recorder: Recorder
) -> None:
    """Steps with other tokens have the same grids, numbers and addresses in every launch of a graph on int4 weights with
    zero points."""
    family = family_of("packed int4 with zero points", tmp_path)
    driver = family.engine(max_batch_tokens=16, max_running=4, max_draft_tokens=0, **TRITON)
    with_graphs(driver, interpreted_engine["graftwork.engine.runner.step_graphs"], recorder, max_mixed_rows=16)

    for number in range(2):
        driver.submit(random_prompt(Random(number), 2 + 3 * number), max_tokens=3, ignore_eos=True)
    driver.finish()

    assert driver.loop.stats().graph_steps > 0
    several = [replays for replays in recorder.replays.values() if len(replays) > 1]
    assert several
    for first, *others in several:
        assert {"sum_parts_kernel", "multiply_codes_kernel"} <= {name for name, *_ in first}
        for other in others:
            assert list(differences(first, other)) == []


def test_rows_in_float8_are_near_and_have_kv_of_their_own(tmp_path: Path) -> None:
    """With rows in float8 the log probabilities of a prompt are near those of plain rows, but not the same, and a session's
    KV on disk is found by an engine of the same setting alone."""
    family = family_of("fp8 tensor, static", tmp_path)
    prompt, session = random_prompt(Random(1), 6), SessionUse(SessionKey("s"))

    def engine(activation_dtype: str) -> EngineDriver:
        disk: dict[str, Any] = {"disk_kv_bytes": 2**22, "kv_folder": tmp_path / "kv", "max_batch_tokens": 8}
        return family.engine(max_running=2, activation_dtype=activation_dtype, weight_kernels="triton", **disk)

    found = {}
    for activation_dtype in ("auto", "fp8"):
        driver = engine(activation_dtype)
        assert driver.command(SessionVerb.READ, "s", prompt).disk_bytes == 0
        outcome = driver.run(prompt, session=session, max_tokens=1, ignore_eos=True, logprobs=5)
        driver.command(SessionVerb.HOLD, "s", prompt)
        assert driver.command(SessionVerb.READ, "s", prompt).disk_bytes > 0
        found[activation_dtype] = outcome.logprobs[0].logprob
        driver.close()

    assert 0 < abs(found["fp8"] - found["auto"]) < 0.5
    driver = engine("auto")
    assert driver.command(SessionVerb.READ, "s", prompt).disk_bytes > 0
    driver.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_dtype": "fp8"}, "on cpu with kernels auto nothing multiplies float8"),
        ({"activation_dtype": "fp8", "weight_kernels": "torch"}, "with kernels torch nothing multiplies float8"),
        ({"activation_dtype": "int8"}, "'int8' is not served: give auto or fp8"),
    ],
)
def test_rows_in_float8_are_refused_where_nothing_multiplies_them(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    """An engine that cannot round rows does not start, and says why."""
    family = family_of("fp8 tensor, static", tmp_path)

    with pytest.raises(InvalidRequest, match=reason):
        family.engine(**options)


def test_rows_in_float8_need_weights_in_float8(tmp_path: Path) -> None:
    """A model of integers is refused, whatever the kernels."""
    family = family_of("gptq", tmp_path)

    with pytest.raises(InvalidRequest, match="no weights of float8_e4m3fn"):
        family.engine(activation_dtype="fp8", weight_kernels="triton")
