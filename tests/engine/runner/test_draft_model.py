"""The draft model's passes: guesses against transformers, whatever was read, rejected or evicted before."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.engine.build.devices import check_draft_model
from graftwork.engine.build.runner import build_draft_model
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.core.sampling import SamplingParams
from graftwork.engine.kv.transfer.device_memory import frame_bytes_for
from graftwork.engine.model.config import read_model_config
from graftwork.engine.runner.draft_model import DraftModelRunner
from graftwork.engine.speculative.draft_model import DraftContext
from graftwork.platform.ids import RequestId
from tests.engine.conftest import RandomModels
from tests.engine.random_models import make_base, reference_model
from tests.hypothesis_profiles import examples

PAGE = 4
VOCABULARY = 97


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("draft") / "draft", seed=5, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def reference(draft_folder: Path) -> torch.nn.Module:
    return reference_model(draft_folder, None)


def draft_model(models: RandomModels, folder: Path, *, pages: int, max_rows: int = 40) -> DraftModelRunner:
    """A draft model of one layer with memory of so many pages, for the random base model."""
    torch.set_num_threads(1)
    frame_bytes = frame_bytes_for(2 * PAGE * 2 * 16 * 4)
    config = EngineConfig(
        models.base,
        dtype="float32",
        page_tokens=PAGE,
        draft_model=folder,
        draft_kv_bytes=pages * frame_bytes,
        max_batch_tokens=max_rows,
        max_running=8,
    )
    draft = check_draft_model(config, read_model_config(models.base))
    model = build_draft_model(config, draft, torch.device("cpu"), weight_bytes=10**6)
    assert model is not None
    return model


def greedy(request_id: str, tokens: Sequence[int], drafted: Sequence[int] = ()) -> DraftContext:
    return DraftContext(RequestId(request_id), tokens, tuple(drafted), SamplingParams(max_tokens=9, temperature=0.0), 0)


def likeliest(reference: torch.nn.Module, tokens: Sequence[int]) -> tuple[int, float]:
    """The likeliest token after a text, and its probability, by transformers."""
    with torch.inference_mode():
        chances = reference(torch.tensor([list(tokens)])).logits[0, -1].softmax(-1)
    token = int(chances.argmax())
    return token, float(chances[token])


def test_guesses_and_their_chances_are_those_of_transformers(
    models: RandomModels, draft_folder: Path, reference: torch.nn.Module
) -> None:
    """Three texts in one pass, then each with its guess behind it, have the likeliest tokens and their probabilities."""
    model = draft_model(models, draft_folder, pages=60)
    texts = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [9]}
    drafted: dict[str, list[int]] = {name: [] for name in texts}

    for _ in range(4):
        done = model.guess([greedy(name, tokens, drafted[name]) for name, tokens in texts.items()])
        for (name, tokens), guess in zip(texts.items(), done.guesses, strict=True):
            assert guess is not None
            token, chance = likeliest(reference, [*tokens, *drafted[name]])
            assert guess.token_id == token
            assert guess.chance == pytest.approx(chance, rel=1e-4)
            drafted[name].append(token)
    assert done.num_rows == 3  # what a pass has read is not read again


texts_of_requests = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=3, max_size=14
)


@settings(max_examples=examples(40))
@given(rounds=st.lists(texts_of_requests, min_size=1, max_size=3), pages=st.integers(14, 40), seed=st.integers(0, 999))
def test_no_history_changes_a_guess(
    models: RandomModels,
    draft_folder: Path,
    reference: torch.nn.Module,
    rounds: list[list[tuple[int, int, int, bool]]],
    pages: int,
    seed: int,
) -> None:
    """Texts grow, drafts are rejected, requests end, pages are few and passes small: each guess is that of the text."""
    model, random = draft_model(models, draft_folder, pages=pages, max_rows=24), Random(seed)
    texts: dict[str, list[int]] = {}
    for acts in rounds:
        asked: dict[str, DraftContext] = {}
        for number, added, num_drafted, ends in acts:
            name = f"r{number}"
            if ends and random.random() < 0.3:
                model.forget(RequestId(name))
                texts.pop(name, None)
            text = texts.setdefault(name, [random.randrange(2, VOCABULARY) for _ in range(random.randint(1, 30))])
            if name not in asked:
                text += [random.randrange(2, VOCABULARY) for _ in range(added)]
                asked[name] = greedy(name, text, [random.randrange(2, VOCABULARY) for _ in range(num_drafted)])
        missing = sum(map(model.num_missing, asked.values()))
        done = model.guess(list(asked.values()))
        model.check_integrity()
        assert done.num_rows <= min(24, missing)
        for context, guess in zip(asked.values(), done.guesses, strict=True):
            if guess is not None:
                assert guess.token_id == likeliest(reference, [*context.token_ids, *context.drafted])[0]
    for name in texts:
        model.forget(RequestId(name))
    model.check_integrity()


def test_a_long_text_is_read_in_parts(models: RandomModels, draft_folder: Path, reference: torch.nn.Module) -> None:
    """A text of 50 tokens, read 20 at a time, has a guess after the third pass."""
    model, text = draft_model(models, draft_folder, pages=60, max_rows=20), [3 + place % 90 for place in range(50)]

    passes = [model.guess([greedy("long", text)]) for _ in range(3)]

    assert [done.num_rows for done in passes] == [20, 20, 10]
    assert [done.guesses[0] is None for done in passes] == [True, True, False]
    assert passes[-1].guesses[0] is not None
    assert passes[-1].guesses[0].token_id == likeliest(reference, text)[0]


def test_pages_are_taken_from_the_text_that_has_waited_longest(models: RandomModels, draft_folder: Path) -> None:
    """Of two texts that fill the memory, a third takes the pages of the first. It takes none of its own pass."""
    model = draft_model(models, draft_folder, pages=4)
    for name in "ab":
        assert model.guess([greedy(name, list(range(2, 10)))]).guesses[0] is not None

    model.guess([greedy("c", [4, 5])])
    both = model.guess([greedy("c", [4, 5]), greedy("a", list(range(2, 18)))])

    assert model.num_missing(greedy("b", list(range(2, 10)))) == 8
    assert [guess is None for guess in both.guesses] == [False, True]
    assert not model.reaches(greedy("b", list(range(2, 10))), 9)
    model.check_integrity()


def test_a_sampled_request_is_guessed_with_its_own_noise(models: RandomModels, draft_folder: Path) -> None:
    """With the served model as its own draft model, each guess at temperature 1 is the token that a step samples."""
    model, text = draft_model(models, models.base, pages=80), [5, 6, 7, 8]
    driver = models.engine(kernels="torch")
    answer = driver.run(text, max_tokens=24, temperature=1.0, seed=11, ignore_eos=True).token_ids
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=11)

    guesses = [
        model.guess([DraftContext(RequestId("one"), [*text, *answer[:count]], (), sampling, 11)]).guesses[0]
        for count in range(24)
    ]

    assert [guess is not None and guess.token_id for guess in guesses] == answer
