"""Defines `client.adapters`, which uploads, lists and deletes adapters, and moves their aliases."""

from pathlib import Path
from typing import Any

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.adapters import Adapter, AliasChange
from graftwork.platform.answers.base import Deleted, Page

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class Adapters(Resource[R]):
    """Manages the tenant's adapters. Sends requests to `/v1/adapters`."""

    @operation
    def push(self, folder: str | Path, *, name: str | None = None) -> Steps[Adapter]:
        """Uploads a PEFT folder as the next version of the adapter `name`. By default `name` is the folder's name.

        If a version already has the same files, the server makes no new version.
        Raises ConfigurationError if a file is missing. Raises ValidationError, which names the wrong tensor or field.
        """
        path = Path(folder)
        for required in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / required).is_file():
                raise ConfigurationError(f"{path} has no {required}; push the folder that PEFT's save_pretrained made.")
        name = name or path.resolve().name
        with (path / CONFIG_FILE).open("rb") as config, (path / WEIGHTS_FILE).open("rb") as weights:
            files: dict[str, Any] = {
                "config": (CONFIG_FILE, config, "application/json"),
                "weights": (WEIGHTS_FILE, weights),
            }
            call = Call("POST", "/v1/adapters", form={"name": name}, files=files, creates=True)
            return (yield from self._read(Adapter, call))

    @operation
    def list(
        self, *, limit: int | None = None, after: str | None = None, order: str | None = None
    ) -> Steps[Page[Adapter]]:
        query = {"limit": limit, "after": after, "order": order}
        return (yield from self._page(Adapter, Call("GET", "/v1/adapters", query=query)))

    @operation
    def get(self, name: str) -> Steps[Adapter]:
        return (yield from self._get(name))

    @operation
    def delete(self, name: str, version: int | None = None) -> Steps[Deleted]:
        """Deletes the adapter `name`, or only its version `version`. Running requests still finish."""
        path = f"/v1/adapters/{path_segment(name)}" + (f"/versions/{version}" if version is not None else "")
        return (yield from self._read(Deleted, Call("DELETE", path)))

    @operation
    def promote(self, name: str, version: int, *, alias: str = "prod") -> Steps[AliasChange]:
        """Points the alias at one version of the adapter `name`.

        A request for `name` without an alias uses the alias `prod`.
        """
        return (yield from self._point(name, alias, version))

    @operation
    def canary(self, name: str, weights: dict[int, float], *, alias: str = "prod") -> Steps[AliasChange]:
        """Splits the requests to an adapter's alias among several versions.

        `weights` maps version numbers to shares of the requests, such as `{2: 0.9, 3: 0.1}`.
        """
        shares = {str(version): share for version, share in weights.items()}
        call = Call("PUT", self._alias_path(name, alias), json={"weights": shares})
        return (yield from self._read(AliasChange, call))

    @operation
    def rollback(self, name: str, *, alias: str = "prod") -> Steps[AliasChange]:
        """Points the alias back at an older version of the adapter.

        This is the newest version that is older than the alias's current versions.
        Raises ConfigurationError if the alias does not exist, or if no older version exists.
        """
        adapter = yield from self._get(name)
        oldest = _oldest_version((adapter.aliases or {}).get(alias))
        if oldest is None:
            raise ConfigurationError(f"{name} has no alias {alias!r}; promote a version first.")
        earlier = [version.version for version in adapter.versions if version.version < oldest]
        if not earlier:
            raise ConfigurationError(f"{name}@{alias} is at version {oldest}, and there is no older one to go back to.")
        return (yield from self._point(name, alias, max(earlier)))

    @operation
    def remove_alias(self, name: str, alias: str) -> Steps[AliasChange]:
        return (yield from self._read(AliasChange, Call("DELETE", self._alias_path(name, alias))))

    def _get(self, name: str) -> Steps[Adapter]:
        return (yield from self._read(Adapter, Call("GET", f"/v1/adapters/{path_segment(name)}")))

    def _point(self, name: str, alias: str, version: int) -> Steps[AliasChange]:
        call = Call("PUT", self._alias_path(name, alias), json={"version": version})
        return (yield from self._read(AliasChange, call))

    def _alias_path(self, name: str, alias: str) -> str:
        return f"/v1/adapters/{path_segment(name)}/aliases/{path_segment(alias)}"


def _oldest_version(target: object) -> int | None:
    """Returns the lowest version in a target such as `{"version": 2}` or `{"weights": {"2": 0.9, "3": 0.1}}`."""
    if not isinstance(target, dict):
        return None
    versions = [target["version"]] if "version" in target else list(target.get("weights", {}))
    return min((int(version) for version in versions), default=None)
