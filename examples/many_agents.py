"""Several agents at once, with asyncio: the server batches what they ask, each on its own adapter."""

import asyncio

from graftwork import AsyncGraftwork

QUESTIONS = ("Who are you?", "What can you do?", "Thank you!")


async def talk(client: AsyncGraftwork, model: str) -> str:
    """One agent: a session of its own, one question after another, the last answer taken as it comes."""
    session = await client.sessions.create(model=model, sampling={"temperature": 0})
    *first, last = QUESTIONS
    for question in first:
        await session.turn(question)
    pieces = [getattr(event, "delta", "") async for event in session.turn(last, stream=True)]
    await session.close()
    return "".join(pieces)


async def main() -> None:
    async with AsyncGraftwork() as client:
        models = [model.id for model in await client.models.list()]
        answers = await asyncio.gather(*(talk(client, model) for model in models * 2))
    for model, answer in zip(models * 2, answers, strict=True):
        print(f"{model}: {answer}")


asyncio.run(main())
