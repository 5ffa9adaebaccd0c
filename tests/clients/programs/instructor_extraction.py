"""instructor, which reads an answer as the arguments of a tool. Mode: plain or streamed.

A plain extraction is checked, and its mistake is sent back as the tool's result: the second turn corrects it.
"""

import sys
from typing import Any

import instructor
from pydantic import BaseModel, field_validator
from weather import MODEL, QUESTIONS, Report

report = Report()
client = instructor.from_provider(f"openai/{MODEL}")


class Weather(BaseModel):
    """The weather of one place."""

    city: str
    degrees: int


class CheckedWeather(Weather):
    """The weather of one place, in a plausible range."""

    @field_validator("degrees")
    @classmethod
    def _is_plausible(cls, degrees: int) -> int:
        report.calls.append({"degrees": degrees})
        if degrees > 60:
            raise ValueError("no place is hotter than 60 degrees")
        return degrees


messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
if sys.argv[1] == "plain":
    found, completion = client.chat.completions.create_with_completion(
        response_model=CheckedWeather, messages=messages, max_retries=2
    )
    report.count(completion.usage)
else:
    for found in client.chat.completions.create_partial(response_model=Weather, messages=messages):
        report.calls.append({"degrees": found.degrees})
report.print(found=found.model_dump())
