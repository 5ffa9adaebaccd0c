"""lm-eval, unmodified, against a served model: its log-likelihoods are those of transformers.

The model is the demo's. The task is a few questions with two answers each, in a folder of the test. lm-eval runs in an
environment of its own, with the versions of requirements/lm-eval.txt.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.clients.environments import python_environment
from tests.end_to_end.conftest import DEMO, DemoServer, free_port

_RUN_WITHIN_S = 240
QUESTIONS = (
    {"question": "Hello, how are you", "answers": ["today?", "xylophone quartz"], "right": 0},
    {"question": "The capital of France is", "answers": ["zzzz", "Paris."], "right": 1},
    {"question": "One, two, three", "answers": ["four", "the and of"], "right": 0},
)
TASK = """
task: two_answers
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: answers
doc_to_target: right
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    server = DemoServer(tmp_path_factory.mktemp("server"), free_port(), {"GRAFTWORK_DTYPE": "float32"})
    try:
        server.start()
        yield server
    finally:
        server.stop()


def reference(question: str, answer: str) -> float:
    """The log-likelihood of an answer after a question, by transformers in fp32."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    context, whole = tokenizer.encode(question), tokenizer.encode(question + " " + answer)
    with torch.inference_mode():
        scores = model(torch.tensor([whole])).logits[0].log_softmax(dim=-1)
    return sum(float(scores[place - 1, whole[place]]) for place in range(len(context), len(whole)))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loglikelihoods_are_those_of_transformers(server: DemoServer, tmp_path: Path, batch_size: int) -> None:
    """lm-eval's local-completions runs a task of two answers, and each log-likelihood equals that of transformers."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "two_answers.yaml").write_text(TASK.format(data=data))
    model_args = {
        "model": "graftwork-demo",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(DEMO / "model"),
        "max_length": 2048,
    }
    lm_eval = python_environment("lm-eval").with_name("lm_eval")
    command = [str(lm_eval), "run", "--model", "local-completions", "--tasks", "two_answers"]
    command += ["--include_path", str(tmp_path), "--batch_size", str(batch_size), "--log_samples"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())]
    command += ["--output_path", str(tmp_path / "results")]
    environment = {
        **os.environ,
        "OPENAI_API_KEY": server.key("Plain"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_RUN_WITHIN_S, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "results").rglob("samples_two_answers*.jsonl")
    for sample in map(json.loads, samples.read_text().splitlines()):
        for answer, ((scored, _), *_) in zip(sample["doc"]["answers"], sample["resps"], strict=True):
            expected = reference(sample["doc"]["question"], answer)
            assert float(scored) == pytest.approx(expected, abs=1e-2)
