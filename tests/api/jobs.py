"""Jobs of one generation each, for whatever reads their events."""

from graftwork.adapters.format.specs import ResolvedModel
from graftwork.api.inference.job import Generation, InferenceJob, Settle
from graftwork.api.inference.usage import UsageFigures
from graftwork.engine.core.sampling import SamplingParams
from graftwork.platform.ids import IsolationDomain, RequestId
from graftwork.sessions.generation.generator import GenerationRequest, Generator
from graftwork.sessions.generation.usage import TallyingEngine
from tests.api.fakes import FakeEngine, describe
from tests.sessions.fakes_text import text_tokenizer


async def settle_nothing(usage: UsageFigures | None, outcome: str) -> None:
    return None


def a_job(engine: FakeEngine, settle: Settle = settle_nothing) -> InferenceJob:
    """A job that is not started yet."""
    tally = TallyingEngine(engine)
    request = GenerationRequest(
        request_id=RequestId("req_1.0"),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=100),
        resolved=ResolvedModel("tiny", None),
        isolation=IsolationDomain(bytes(32)),
    )
    generator = Generator(tally, text_tokenizer(), describe())
    return InferenceJob(RequestId("req_1"), [Generation(request, generator, tally)], 1, settle, {})
