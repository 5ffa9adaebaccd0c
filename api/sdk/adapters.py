"""Defines `client.adapters`, which uploads, lists and deletes adapters, and moves their aliases."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graftwork.api.sdk.transport.effects import Call, Steps
from graftwork.api.sdk.transport.operation import R, Resource, operation, path_segment
from graftwork.api.sdk.uploads import CONFIG_FILE, WEIGHTS_FILE, AdapterFileSet, AdapterUploads, Progress
from graftwork.platform.answers.adapters import Adapter, AliasChange, AliasEvent, Rollout, VersionUpload
from graftwork.platform.answers.base import Deleted, Page

PARTS_ABOVE_BYTES = 64 * 2**20
"""Weights above this size are sent in parts."""


class Adapters(Resource[R]):
    """Manages the tenant's adapters. Sends requests to `/v1/adapters`."""

    @property
    def uploads(self) -> AdapterUploads[R]:
        """The uploads in parts, and the fetches, that have not expired."""
        return AdapterUploads(self._runtime)

    @operation
    def push(
        self,
        path: str | Path,
        *,
        name: str | None = None,
        promote: bool = True,
        run: str | None = None,
        parent: str | None = None,
        data_digest: str | None = None,
        user: str | None = None,
        progress: Progress | None = None,
    ) -> Steps[Adapter]:
        """Uploads a PEFT folder, or a GGUF file, as the next version of the adapter `name`. By default `name` is the
        folder's name, or the file's without its ending.

        While the adapter has no alias `prod`, its plain name stands for its newest version. With `promote=False`, it goes
        on standing for what it stood for. `run` is the training run, `parent` the version from which it was trained, such as
        `support@3`, and `data_digest` the `sha256:…` of the training data; the server keeps them. `user` is the end user in
        whose limit of adapters a new adapter counts. If a version already has the same files, the server makes no new
        version.
        Weights above 64 MiB go in parts: if the connection breaks, the upload goes on, and a later push of the same files
        goes on where this one stopped. With `progress`, all do; it is called with the bytes that have arrived, and all.
        Raises ConfigurationError if a file is missing. Raises ValidationError, which names the wrong tensor or field.
        """
        files, given = AdapterFileSet.at(Path(path)), Path(path).resolve()
        name = name or (given.stem if files.config is None else given.name)
        fields = {"promote": promote, "run": run, "parent": parent, "data_digest": data_digest}
        fields |= {"user": user} if user else {}
        if progress is None and files.config is not None and files.size_bytes <= PARTS_ABOVE_BYTES:
            return (yield from self._push_at_once(name, files, fields))
        yield from self.uploads.pushed(name, files, fields, progress)
        return (yield from self._get(name))

    @operation
    def fetch(
        self,
        name: str,
        source: str,
        *,
        digest: str | None = None,
        promote: bool = True,
        run: str | None = None,
        parent: str | None = None,
        data_digest: str | None = None,
        user: str | None = None,
        wait: bool = True,
        progress: Progress | None = None,
    ) -> Steps[VersionUpload]:
        """Lets the server fetch a version of the adapter `name`, and waits for its end unless `wait` is false.

        `source` is `hf:ORGANISATION/NAME@REVISION`, `s3://BUCKET/PREFIX` or `https://…`. `digest` is the `sha256:…` of
        adapter_config.json and adapter_model.safetensors, one after the other; an `https://` source needs it. The other
        arguments are those of `push`. Raises ValidationError if the server cannot fetch or use the files.
        """
        fields = {"promote": promote, "run": run, "parent": parent, "data_digest": data_digest}
        fields |= {"user": user} if user else {}
        upload = yield from self.uploads.fetched(name, source, digest, fields)
        return (yield from self.uploads.ended(upload, progress)) if wait else upload

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

    def _push_at_once(self, name: str, files: AdapterFileSet, fields: Mapping[str, Any]) -> Steps[Adapter]:
        """Uploads both files in one request."""
        sent = {field: value for field, value in fields.items() if field != "promote" and value is not None}
        form = {"name": name} | sent | ({} if fields["promote"] else {"promote": "false"})
        with files.weights.open("rb") as weights:
            parts: dict[str, Any] = {
                "config": (CONFIG_FILE, files.config, "application/json"),
                "weights": (WEIGHTS_FILE, weights),
            }
            call = Call("POST", "/v1/adapters", form=form, files=parts, creates=True)
            return (yield from self._read(Adapter, call))

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
