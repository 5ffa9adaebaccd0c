"""A LoRA adapter uploaded, given an alias, used, and deleted.

    python examples/push_adapter.py [FOLDER]

FOLDER is what PEFT's `save_pretrained` wrote; without it, the demo's pirate is pushed.
"""

import sys
from pathlib import Path

from graftwork import Graftwork

DEMO_ADAPTER = Path(__file__).parent.parent / "demo" / "adapters" / "pirate"
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO_ADAPTER

with Graftwork() as client:
    # The same bytes again are the same version; other bytes are the next one.
    adapter = client.adapters.push(folder, name="my-adapter")
    assert adapter.newest is not None
    print(f"{adapter.name}@{adapter.newest.version} is {adapter.newest.status}, rank {adapter.newest.rank}")

    # "my-adapter" alone now means this version, until the alias is moved.
    change = client.adapters.promote("my-adapter", adapter.newest.version)
    print(f"{change.adapter}@{change.alias} was {change.previous}, is {change.target}")

    for model in ("graftwork-demo", "my-adapter"):
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Who are you?"}], temperature=0
        )
        print(f"{model}: {answer.choices[0].message.content}")

    client.adapters.delete("my-adapter")
    print("my-adapter is deleted")
