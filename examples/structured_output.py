"""An answer that always fits a JSON schema: each token that would leave it is ruled out while the answer is made."""

import json

from graftwork import Graftwork

TRIP = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Tokyo"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 14},
        "fare": {"enum": ["low", "high"]},
    },
    "required": ["city", "nights", "fare"],
    "additionalProperties": False,
}

with Graftwork() as client:
    answer = client.chat.completions.create(
        model="graftwork-demo",
        messages=[{"role": "user", "content": "Plan a trip."}],
        response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}},
    )
    trip = json.loads(answer.choices[0].message.content or "")
    print(f"{trip['nights']} nights in {trip['city']} at a {trip['fare']} fare")

    # A regular expression works as well.
    answer = client.chat.completions.create(
        model="graftwork-demo",
        messages=[{"role": "user", "content": "When do we leave?"}],
        extra_body={"regex": "(Monday|Friday) at ([01][0-9]|2[0-3]):[0-5][0-9]"},
    )
    print(answer.choices[0].message.content)
