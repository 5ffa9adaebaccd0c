"""The process that parses long JSON bodies: `python -m graftwork.platform.json_worker <socket>`.

A body of millions of values takes seconds and hundreds of megabytes, and the parser holds the interpreter's lock all the
time. So the gateway sends each long body here and gets back its value, or the reason why it is refused.
"""

from typing import Any

from graftwork.platform.strict_json import parse_json
from graftwork.platform.worker_pool import WorkerPool, serve

BYTES_PER_SECOND = 16_000_000
"""How much of one tenant's long bodies is parsed in a second. Receiving and moving them takes the gateway's time too."""


class JsonParsing:
    """Parses the long bodies of all tenants, on the gateway's side."""

    def __init__(self) -> None:
        self.workers = WorkerPool("graftwork.platform.json_worker", dict)

    async def parse(self, owner: str, body: bytes) -> Any:
        """Returns the value of a body. Raises InvalidRequest with the reason. Bodies of one owner wait for each other.

        Can also raise CapacityContended, PayloadTooLarge or Unavailable.
        """
        return await self.workers.run(owner, body, pause_s=len(body) / BYTES_PER_SECOND)

    async def close(self) -> None:
        """Ends the worker process."""
        await self.workers.close()


if __name__ == "__main__":
    serve(lambda _: parse_json)
