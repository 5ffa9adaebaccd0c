"""Tests of the figures by which a quantised model is compared with its parent, against transformers."""

import math
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graftwork.engine.core.config import EngineConfig
from graftwork.engine.evaluation.comparison import Divergence, DivergenceMeter, LikelihoodMeter, ParentRows, TextFigures
from graftwork.engine.evaluation.gate import Limits, judge
from graftwork.engine.evaluation.text_scorer import TextScorer
from tests.engine.families import load_model, make_family
from tests.engine.hybrid_families import HYBRID_FAMILIES

SIZES = LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
TEXTS = [[Random(length).randrange(97) for _ in range(length)] for length in (130, 2, 17)]


def write_pair(folder: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A random model, and one whose weights were rounded."""
    torch.manual_seed(5)
    parent = LlamaForCausalLM(SIZES)
    parent.train(False)
    with torch.no_grad():
        for parameter in parent.parameters():
            parameter.mul_(4.0)
    child = LlamaForCausalLM(SIZES)
    child.train(False)
    child.load_state_dict({name: (value * 64).round() / 64 for name, value in parent.state_dict().items()})
    parent.save_pretrained(folder / "parent")
    child.save_pretrained(folder / "child")
    return parent, child


def logprobs(model: LlamaForCausalLM) -> torch.Tensor:
    """What transformers expects after each token but the last of each text: [rows, vocab]."""
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([text])).logits[0, :-1].log_softmax(-1) for text in TEXTS]).double()


def scorer(folder: Path) -> TextScorer:
    config = EngineConfig(
        model=folder, dtype="float32", device="cpu", device_bytes=4 * 2**20, host_kv_bytes=0, max_batch_tokens=48
    )
    return TextScorer(config)


def test_recurrent_layers_are_scored_as_transformers_does(tmp_path: Path) -> None:
    """The perplexity of a model with recurrent layers is that of transformers' logits, over chunks and several texts."""
    folder = make_family(HYBRID_FAMILIES["granite-hybrid-groups"], tmp_path, ()).folder
    texts = [[token % 97 for token in text[:60]] for text in TEXTS]
    model, meter = load_model(folder).train(False), LikelihoodMeter(texts)

    own = scorer(folder)
    own.score(texts, meter.take)
    own.close()

    with torch.inference_mode():
        losses = [
            torch.nn.functional.cross_entropy(
                model(torch.tensor([text])).logits[0, :-1].double(), torch.tensor(text[1:]), reduction="sum"
            )
            for text in texts
        ]
    expected = math.exp(float(sum(losses)) / sum(len(text) - 1 for text in texts))
    assert meter.figures().perplexity == pytest.approx(expected, rel=1e-5)


def test_figures_are_those_of_transformers(tmp_path: Path) -> None:
    """Perplexity, KL divergence and agreement equal those of transformers' logits, over chunks and several texts."""
    parent, child = map(logprobs, write_pair(tmp_path))
    own, theirs = LikelihoodMeter(TEXTS), LikelihoodMeter(TEXTS)
    told: list[int] = []

    first = scorer(tmp_path / "parent")
    rows = ParentRows(tmp_path / "rows", theirs.num_rows, first.vocab_size)

    def keep(place: int, found: torch.Tensor) -> None:
        theirs.take(place, found)
        rows.put(place, found)

    first.score(TEXTS, keep, told.append)
    first.close()
    meter, second = DivergenceMeter(rows), scorer(tmp_path / "child")

    def compare(place: int, found: torch.Tensor) -> None:
        own.take(place, found)
        meter.take(place, found)

    second.score(TEXTS, compare)
    second.close()

    following = torch.tensor([token for text in TEXTS for token in text[1:]])
    kl = (parent.exp() * (parent - child)).sum(1)
    figures = meter.figures()
    assert told == [130, 2, 17]
    assert theirs.figures().num_tokens == len(following) == 146
    for found, expected in ((theirs, parent), (own, child)):
        perplexity = math.exp(-expected.gather(1, following[:, None]).mean())
        assert found.figures().perplexity == pytest.approx(perplexity, rel=1e-4)
    assert figures.mean_kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert figures.worst_kl == pytest.approx(float(kl.quantile(0.99)), rel=1e-2)
    assert figures.agreement == pytest.approx(float((parent.argmax(1) == child.argmax(1)).double().mean()), abs=0.011)
    assert 0.001 < figures.mean_kl < 1.0


def test_the_memory_is_told(tmp_path: Path) -> None:
    """The bytes of the weights, and of the KV of a token, are those of the shapes."""
    parent, _ = write_pair(tmp_path)
    loaded = scorer(tmp_path / "parent")

    assert loaded.kv_token_bytes == 2 * 2 * 2 * 8 * 4
    assert loaded.weights_bytes >= 4 * sum(parameter.numel() for parameter in parent.parameters())
    loaded.close()


@pytest.mark.parametrize(
    ("kl", "agreement", "perplexity", "failed"),
    [
        (0.05, 0.95, 103.0, []),
        (0.051, 0.95, 100.0, ["mean KL"]),
        (0.0, 0.94, 100.0, ["agreement"]),
        (0.0, 1.0, 103.1, ["perplexity ratio"]),
        (math.nan, math.nan, math.nan, ["mean KL", "agreement", "perplexity ratio"]),
        (math.inf, 0.0, math.inf, ["mean KL", "agreement", "perplexity ratio"]),
    ],
)
def test_the_gate_refuses_what_is_beyond_a_limit(
    kl: float, agreement: float, perplexity: float, failed: list[str]
) -> None:
    """Each figure has its own limit, and no number is beyond all."""
    verdict = judge(TextFigures(9, perplexity), TextFigures(9, 100.0), Divergence(kl, kl, agreement), Limits())

    assert [one.name for one in verdict.judgements if not one.holds] == failed
    assert verdict.passes == (not failed)
