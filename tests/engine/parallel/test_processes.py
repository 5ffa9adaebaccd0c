"""Tests of workers as processes: they compute the same, and neither they nor the engine outlive each other."""

import contextlib
import os
import re
import signal

import psutil  # type: ignore[import-untyped]
import pytest

from graftwork.engine.build.engine import build_engine
from graftwork.engine.core.config import EngineConfig
from graftwork.engine.parallel.workers import WorkerLink, start_process
from graftwork.engine.step_pipeline import DeviceLost
from tests.engine.conftest import RandomModels
from tests.engine.engine_driver import EngineDriver
from tests.engine.tagged_kv_cache import load_always

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def engine_of_processes(models: RandomModels, num_ranks: int) -> tuple[EngineDriver, dict[int, WorkerLink]]:
    """Returns an engine, and the links to its workers by process id, in the order of ranks."""
    links: dict[int, WorkerLink] = {}

    def start(rank: int) -> WorkerLink:
        before = children()
        link = start_process(rank)
        links[(children() - before).pop()] = link
        return link

    config = EngineConfig(
        model=models.base, dtype="float32", page_tokens=4, device_bytes=4 * 2**20, tensor_parallel=num_ranks
    )
    engine = build_engine(config, lambda _: models.source, costs=load_always(), start_worker=start)
    return EngineDriver(engine), links


def test_a_process_for_each_rank_computes_the_same_and_ends_with_the_engine(models: RandomModels) -> None:
    """Two processes answer base and adapter prompts as one does; when the engine closes, the worker's process is gone."""
    expected = [models.engine().run(PROMPT, adapter=digest).token_ids for digest in (None, "sha256:wide")]
    driver, links = engine_of_processes(models, 2)

    answers = [driver.run(PROMPT, adapter=digest).token_ids for digest in (None, "sha256:wide")]
    driver.close()

    assert answers == expected
    assert len(links) == 1
    assert not any(psutil.pid_exists(pid) for pid in links)


@pytest.mark.slow
@pytest.mark.parametrize("is_computing", [False, True])
def test_a_killed_worker_ends_the_engine_with_its_cause(models: RandomModels, is_computing: bool) -> None:
    """If one of three workers is killed, idle or in the middle of an answer, the loop ends with DeviceLost, and the other
    workers end too. An idle engine's error names a rank: the killed one, or on a busy machine one that was still ending the
    last step and has lost its connection."""
    driver, links = engine_of_processes(models, 4)
    driver.run(PROMPT)
    if is_computing:
        driver.submit(PROMPT, max_tokens=200, ignore_eos=True)
        driver.step()

    os.kill(list(links)[1], signal.SIGKILL)

    with pytest.raises(DeviceLost) as lost:
        driver.loop.run()
    if not is_computing:  # in the middle of a step, the broken connection may be seen before the process's end
        words = f"{lost.value} {lost.value.__cause__}"
        assert re.search("rank 2 ended with status -9|rank [13] failed: .*Connection", words), words
    for link in links.values():
        with contextlib.suppress(BrokenPipeError):
            link.commands.close()
        link.wait()
    assert not any(psutil.pid_exists(pid) for pid in links)
