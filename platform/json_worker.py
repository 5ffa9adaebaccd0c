"""The process that parses long JSON bodies: `python -m graftwork.platform.json_worker <socket>`.

A body of millions of values needs seconds and hundreds of megabytes, and Python's parser blocks all threads meanwhile.
So the gateway sends each long body to this process, and receives its value or the reason of a refusal.
"""

from typing import Any

from graftwork.platform.strict_json import parse_json
from graftwork.platform.worker_pool import WorkerPool, serve

BYTES_PER_SECOND = 16_000_000
"""The most bytes of one tenant's long bodies in a second. To receive and copy them costs the gateway time, too."""


class JsonParsing:
    """Parses the long bodies of all tenants. Belongs to the gateway, and owns its worker process."""

    def __init__(self) -> None:
        self.workers = WorkerPool("graftwork.platform.json_worker", dict)

    async def parse(self, owner: str, body: bytes) -> Any:
        """Returns the value of a body of the tenant `owner`. Parses one body of a tenant at a time.

        Raises InvalidRequest with the reason. Can also raise the errors of `WorkerPool.run`.
        """
        return await self.workers.run(owner, body, pause_s=len(body) / BYTES_PER_SECOND)

    async def close(self) -> None:
        """Ends the worker process."""
        await self.workers.close()


if __name__ == "__main__":
    serve(lambda _: parse_json)
