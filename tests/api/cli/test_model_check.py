"""Tests of `graftwork model check` on the demo model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from graftwork.api.cli.main import build_app

MODEL = Path(__file__).parents[3] / "demo" / "model"
TEXT = "The harbour was quiet. A fisherman asked for the time, and nobody knew it. The bell rang three times. " * 3


def check(*arguments: object) -> Result:
    return CliRunner().invoke(
        build_app(), ["model", "check", "--tokens", "60", "--device", "cpu", *map(str, arguments)]
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def noisy(folder: Path, share: float) -> Path:
    """The demo model with noise on each weight, as a part of its size."""
    shutil.copytree(MODEL, folder)
    (weights,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = {name: one.float() for name, one in load_file(weights).items()}
    save_file(
        {
            name: (one + share * one.std() * torch.randn(one.shape, generator=generator)).bfloat16()
            if one.ndim > 1
            else one.bfloat16()
            for name, one in tensors.items()
        },
        weights,
        {"format": "pt"},
    )
    return folder


def test_a_model_equals_itself(texts: Path) -> None:
    """Without a change, nothing diverges, and the gate opens."""
    answer = check(MODEL, "--against", MODEL, "--texts", texts, "--json")

    body = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert body["passes"] is True
    assert body["divergence"] == {"mean_kl": 0.0, "worst_kl": 0.0, "agreement": 1.0}
    assert body["model"] == body["parent"]
    assert body["memory"]["weights_bytes"] > 0


def test_a_broken_model_is_refused(texts: Path, tmp_path: Path) -> None:
    """A model with much noise fails with status 1, and the table says by which figure."""
    answer = check(noisy(tmp_path / "broken", 1.0), "--against", MODEL, "--texts", texts)

    assert answer.exit_code == 1, answer.output
    assert "do not deploy" in answer.stdout
    assert "NO" in answer.stdout


def test_a_model_without_a_parent_has_a_perplexity(texts: Path) -> None:
    """Its own figures are told, with no verdict."""
    answer = check(MODEL, "--texts", texts)

    assert answer.exit_code == 0, answer.output
    assert "perplexity" in answer.stdout
    assert "--against" in answer.stdout


def test_wrong_files_are_told(texts: Path, tmp_path: Path) -> None:
    """Texts that are missing or empty, and a parent with another tokenizer, are an error that says what to do."""
    (tmp_path / "empty.txt").write_text("")
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(content))

    for arguments, told in (
        ((MODEL, "--texts", tmp_path / "empty.txt"), "two tokens"),
        ((MODEL, "--texts", tmp_path / "none.txt"), "--texts"),
        ((MODEL, "--against", other, "--texts", texts), "tokenizers"),
        ((tmp_path / "nowhere", "--texts", texts), "config.json"),
    ):
        answer = check(*arguments)
        assert answer.exit_code != 0
        assert told in str(answer.exception) + answer.output


def test_rounded_weights_are_measured(texts: Path) -> None:
    """int8 weights are near the parent and take less memory; int4 in a model this small is refused."""
    near = check(MODEL, "--against", MODEL, "--texts", texts, "--quantization", "int8", "--json", "--max-kl", "0.2")
    far = check(MODEL, "--against", MODEL, "--texts", texts, "--quantization", "int4", "--json")

    plain = json.loads(check(MODEL, "--texts", texts, "--json").stdout)
    eight, four = json.loads(near.stdout), json.loads(far.stdout)
    assert 0 < eight["divergence"]["mean_kl"] < four["divergence"]["mean_kl"]
    assert eight["divergence"]["mean_kl"] < 0.2
    assert (far.exit_code, four["passes"]) == (1, False)
    sizes = [body["memory"]["weights_bytes"] for body in (plain, eight, four)]
    assert sizes[0] > 1.6 * sizes[1] > 1.6 * sizes[2]


def test_kv_in_bytes_is_measured(texts: Path) -> None:
    """KV in int8 is near the parent's and takes half its bytes and the scales."""
    answer = check(
        MODEL, "--against", MODEL, "--texts", texts, "--kv-dtype", "int8", "--json", "--min-agreement", "0.8"
    )

    body = json.loads(answer.stdout)
    plain = json.loads(check(MODEL, "--texts", texts, "--json").stdout)
    assert body["divergence"]["mean_kl"] > 0
    assert body["divergence"]["agreement"] >= 0.8
    assert body["memory"]["kv_token_bytes"] / plain["memory"]["kv_token_bytes"] in (34 / 64, 34 / 128)  # bf16, fp32


def test_the_loss_of_a_window_is_measured_against_the_exact_model(texts: Path) -> None:
    """A short window loses more than a long one, and the figures of the parent are those without a window."""
    bodies = {
        window: json.loads(
            check(MODEL, "--against", MODEL, "--texts", texts, "--json", "--window", window, "--sinks", 2).stdout
        )
        for window in (3, 40)
    }

    assert bodies[3]["parent"] == bodies[40]["parent"]
    assert bodies[3]["divergence"]["mean_kl"] > 2 * bodies[40]["divergence"]["mean_kl"] > 0
    assert bodies[3]["passes"] is False


def test_a_window_that_forgets_nothing_is_refused(texts: Path) -> None:
    """A window over all of the texts would measure nothing; sinks without a window are refused too."""
    wide = check(MODEL, "--texts", texts, "--window", 60)
    alone = check(MODEL, "--texts", texts, "--sinks", 4)

    assert wide.exit_code != 0
    assert "nothing would be out of sight" in wide.output
    assert alone.exit_code != 0
    assert "attention_sinks has no effect without attention_window" in alone.output


def test_the_loss_of_a_budget_is_measured_where_it_is_felt(tmp_path: Path) -> None:
    """Only the tokens that are decoded from what is kept count, for the parent too: a small budget loses more than a large
    one, and texts too short for the budget are refused."""
    (tmp_path / "text.txt").write_text(TEXT * 6)
    arguments = (MODEL, "--against", MODEL, "--texts", tmp_path / "text.txt", "--json")
    answers = {budget: check(*arguments, "--kv-budget", budget, "--tokens", 600) for budget in (64, 200)}
    bodies = {budget: json.loads(answer.stdout) for budget, answer in answers.items()}
    short = check(*arguments, "--kv-budget", 64)

    assert bodies[64]["model"]["num_tokens"] == bodies[64]["parent"]["num_tokens"] < 600 / 3
    assert bodies[64]["divergence"]["mean_kl"] > bodies[200]["divergence"]["mean_kl"] > 0
    assert short.exit_code != 0
    assert "three quarters of it must be twice the budget" in short.output
