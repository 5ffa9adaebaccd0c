"""Defines `client.adapters`, which uploads, lists and deletes adapters, and moves their aliases."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.errors import ConfigurationError
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.platform.answers.adapters import Adapter, AliasChange, AliasEvent, Rollout
from graftwork.platform.answers.base import Deleted, Page

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class Adapters(Resource[R]):
    """Manages the tenant's adapters. Sends requests to `/v1/adapters`."""

    @operation
    def push(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        promote: bool = True,
        run: str | None = None,
        parent: str | None = None,
        data_digest: str | None = None,
    ) -> Steps[Adapter]:
        """Uploads a PEFT folder as the next version of the adapter `name`. By default `name` is the folder's name.

        While the adapter has no alias `prod`, its plain name stands for its newest version. With `promote=False`, it goes
        on standing for what it stood for. `run` is the training run, `parent` the version from which it was trained, such as
        `support@3`, and `data_digest` the `sha256:…` of the training data; the server keeps them. If a version already has the same files, the server makes no new version.
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
            fields = {"promote": None if promote else "false", "run": run, "parent": parent, "data_digest": data_digest}
            form = {"name": name} | {field: value for field, value in fields.items() if value is not None}
            call = Call("POST", "/v1/adapters", form=form, files=files, creates=True)
            return (yield from self._read(Adapter, call))

    @operation
    def list(
        self,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: str | None = None,
        tags: Iterable[str] = (),
        name: str | None = None,
        base: str | None = None,
        state: str | None = None,
    ) -> Steps[Page[Adapter]]:
        """Lists adapters: with all of `tags`, with the text `name` in their names, made for the base with the fingerprint
        `base`, and in the state `ready` (the default) or `deleted`.
        """
        query = {"limit": limit, "after": after, "order": order, "tag": [*tags] or None}
        query |= {"name": name, "base": base, "state": state}
        return (yield from self._page(Adapter, Call("GET", "/v1/adapters", query=query)))

    @operation
    def get(self, name: str) -> Steps[Adapter]:
        return (yield from self._get(name))

    @operation
    def change(
        self, name: str, *, tags: Iterable[str] | None = None, defaults: Mapping[str, Any] | None = None
    ) -> Steps[Adapter]:
        """Replaces an adapter's tags, or the defaults of its requests. None changes nothing.

        `defaults` may have `system`, `sampling`, `response_format` and `tools`. An empty dict removes them.
        """
        body: dict[str, Any] = {} if tags is None else {"tags": [*tags]}
        if defaults is not None:
            body["defaults"] = dict(defaults)
        return (yield from self._read(Adapter, Call("PATCH", self._path(name, None), json=body)))

    @operation
    def delete(self, name: str, version: int | None = None, *, erase: bool = False) -> Steps[Deleted]:
        """Deletes the adapter `name`, or only its version `version`. Running requests still finish.

        The server keeps it for a time, so that `restore` can bring it back, unless `erase` is true.
        """
        query = {"erase": "true" if erase else None}
        return (yield from self._read(Deleted, Call("DELETE", self._path(name, version), query=query)))

    @operation
    def restore(self, name: str, version: int | None = None) -> Steps[Adapter]:
        """Restores the adapter `name`, or only its version `version`, after it was deleted."""
        return (yield from self._read(Adapter, Call("POST", f"{self._path(name, version)}/restore", creates=True)))

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
        """Gives the alias the target that it had before its present one. A second rollback goes back one target more.

        Raises ConflictError if the alias had no earlier target, or if the versions of all of them were deleted.
        """
        call = Call("POST", f"{self._alias_path(name, alias)}/rollback", creates=True)
        return (yield from self._read(AliasChange, call))

    @operation
    def history(
        self, name: str, *, alias: str = "prod", limit: int | None = None, after: str | None = None
    ) -> Steps[Page[AliasEvent]]:
        """Lists the changes of an alias, the newest first."""
        query = {"limit": limit, "after": after}
        return (yield from self._page(AliasEvent, Call("GET", f"{self._alias_path(name, alias)}/history", query=query)))

    @operation
    def roll_out(
        self,
        name: str,
        version: int,
        steps: Iterable[tuple[float, float]],
        *,
        alias: str = "prod",
        limits: Mapping[str, float | None] | None = None,
    ) -> Steps[Rollout]:
        """Lets a version take over an alias step by step, and rolls it back if it is worse than the stable version.

        `steps` are pairs of a share in percent and seconds, such as `[(10, 600), (50, 600)]`. `limits` may have
        `min_requests`, `error_rate`, `refusal_rate` and `first_token_ratio`; None sets no limit.
        """
        body: dict[str, Any] = {"alias": alias, "version": version}
        body["steps"] = [{"weight": weight, "seconds": seconds} for weight, seconds in steps]
        if limits is not None:
            body["limits"] = dict(limits)
        call = Call("POST", self._rollout_path(name), json=body, creates=True)
        return (yield from self._read(Rollout, call))

    @operation
    def rollouts(self, name: str, *, limit: int | None = None, after: str | None = None) -> Steps[Page[Rollout]]:
        """Lists the roll-outs of an adapter, the newest first."""
        query = {"limit": limit, "after": after}
        return (yield from self._page(Rollout, Call("GET", self._rollout_path(name), query=query)))

    @operation
    def rollout(self, name: str, rollout_id: str) -> Steps[Rollout]:
        """Returns a roll-out with the figures of its present step."""
        return (yield from self._read(Rollout, Call("GET", self._rollout_path(name, rollout_id))))

    @operation
    def cancel_rollout(self, name: str, rollout_id: str) -> Steps[Rollout]:
        """Cancels a roll-out. The alias leads to the stable version again."""
        call = Call("POST", f"{self._rollout_path(name, rollout_id)}/cancel", creates=True)
        return (yield from self._read(Rollout, call))

    @operation
    def remove_alias(self, name: str, alias: str) -> Steps[AliasChange]:
        return (yield from self._read(AliasChange, Call("DELETE", self._alias_path(name, alias))))

    def _get(self, name: str) -> Steps[Adapter]:
        return (yield from self._read(Adapter, Call("GET", f"/v1/adapters/{path_segment(name)}")))

    def _point(self, name: str, alias: str, version: int) -> Steps[AliasChange]:
        call = Call("PUT", self._alias_path(name, alias), json={"version": version})
        return (yield from self._read(AliasChange, call))

    def _rollout_path(self, name: str, rollout_id: str | None = None) -> str:
        path = f"/v1/adapters/{path_segment(name)}/rollouts"
        return path if rollout_id is None else f"{path}/{path_segment(rollout_id)}"

    def _path(self, name: str, version: int | None) -> str:
        return f"/v1/adapters/{path_segment(name)}" + (f"/versions/{version}" if version is not None else "")

    def _alias_path(self, name: str, alias: str) -> str:
        return f"/v1/adapters/{path_segment(name)}/aliases/{path_segment(alias)}"
