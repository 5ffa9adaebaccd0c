"""Fetches models that are not folders of this machine: from the Hugging Face Hub, or from a bucket.

    hf:ORGANISATION/NAME@REVISION   into huggingface_hub's own cache, which other programs share
    s3://BUCKET/PREFIX              into `models` of the data folder (also gs:// and az://)

A fetched model is a folder like any other. Its files are those that an engine or a gateway reads: no code, no weights in
other formats. Credentials come from the environment, as the provider's own tools read them.
Invariant: a folder is returned only when all its files are whole. What was fetched is used again while the source does not
answer.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from graftwork.platform.errors import GraftworkError, InvalidRequest, Unavailable
from graftwork.platform.settings.values import ModelReference

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_TEXT_FILES = (".json", ".jinja")
_WEIGHT_FILES = (".safetensors",)
_IGNORED = ("*/*", "consolidated*")
"""Files of folders below, and Mistral's second copy of its weights."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES_AT_ONCE = 8
_MIN_CHUNK_BYTES = 8 * 2**20
_TIMEOUT = timedelta(seconds=30)

logger = logging.getLogger(__name__)


def fetched_model(reference: ModelReference, data_dir: Path, *, with_weights: bool = True) -> Path:
    """Returns the folder of a model, which is fetched first if this machine lacks it or has an older one.

    Without weights, the folder has at least the configuration, the tokenizer and the chat template.
    Raises InvalidRequest if there is no such model, or if this machine may not read it, and Unavailable if the source does
    not answer and nothing was fetched before.
    """
    endings = _TEXT_FILES + (_WEIGHT_FILES if with_weights else ())
    if reference.is_on_hub:
        return _from_hub(reference, endings)
    return _from_bucket(reference, data_dir / "models", endings)


def hub_address() -> str:
    """Returns the address of the Hub, or of the mirror that the environment names (`HF_ENDPOINT`)."""
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT


# ---- the Hub --------------------------------------------------------------------------------------------------


def _from_hub(reference: ModelReference, endings: tuple[str, ...]) -> Path:
    from huggingface_hub import errors, snapshot_download

    repository, revision = reference.repository, reference.revision or "main"
    patterns = [f"*{ending}" for ending in endings]
    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": patterns, "ignore_patterns": list(_IGNORED)}
    if _COMMIT.fullmatch(revision) and (kept := _kept(repository, wanted)) is not None:
        return kept
    try:
        folder = Path(str(snapshot_download(repository, **wanted)))
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:  # type: ignore[attr-defined]  # of the transport
        found = _hub_error(reference, error)
        kept = _kept(repository, wanted) if isinstance(found, Unavailable) else None
        if kept is None:
            raise found from error
        logger.warning("the Hub does not answer (%s); what was fetched before is served", _first_line(error))
        return kept
    if not _COMMIT.fullmatch(revision):
        logger.warning(
            "the model %s is at commit %s now; --model hf:%s@%s serves the same weights at each start",
            *(reference, folder.name, repository, folder.name),
        )
    return folder


def _kept(repository: str, wanted: dict[str, Any]) -> Path | None:
    """Returns the folder of a model that is whole on this machine, without asking the Hub; None if it is not."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(str(snapshot_download(repository, local_files_only=True, **wanted)))
    except errors.LocalEntryNotFoundError:
        return None


def _hub_error(reference: ModelReference, error: Exception) -> GraftworkError:
    """Returns the error of this project for one of the Hub's client."""
    from huggingface_hub import errors

    said = {
        errors.GatedRepoError: "is gated: accept its terms on the Hub, and set HF_TOKEN to a token of that account",
        errors.RepositoryNotFoundError: (
            "is not on the Hub, or is private: check the name, and set HF_TOKEN to a token that may read it"
        ),
        errors.RevisionNotFoundError: f"has no revision {reference.revision}: name a branch, a tag or a commit of it",
        errors.HFValidationError: "is no name of the Hub: write hf:ORGANISATION/NAME@REVISION",
    }
    for kind, what in said.items():
        if isinstance(error, kind):
            return InvalidRequest(f"The model {reference.repository} {what}.", param="model")
    return Unavailable(
        f"The model {reference.repository} is not whole on this machine, and could not be fetched from the Hub: "
        f"{_first_line(error)}. Try again, or give --model a folder."
    )


# ---- buckets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Object:
    """One file of a model in a bucket."""

    name: str
    size: int
    version: str
    """Changes with the content."""


def _from_bucket(reference: ModelReference, models: Path, endings: tuple[str, ...]) -> Path:
    """Fetches the files below a prefix into a folder of `models` that is named by what the bucket lists."""
    if find_spec("obstore") is None:
        raise InvalidRequest(
            f"--model {reference} needs the library obstore: pip install 'graftwork[objects]'.", param="model"
        )
    from obstore.exceptions import BaseError

    own = models / hashlib.sha256(f"{reference} {endings}".encode()).hexdigest()[:16]
    try:
        store = _open_store(reference)
        objects = _listed(store, endings)
    except (BaseError, OSError) as error:
        return _fetched_before(reference, own, error)
    if not any(one.name == "config.json" for one in objects):
        raise InvalidRequest(
            f"{reference} has no config.json: it must hold a Hugging Face model's files.", param="model"
        )
    folder = own / _version_of(objects)
    if not folder.is_dir():
        _fetch(reference, store, objects, folder)
    return folder


def _open_store(reference: ModelReference) -> "ObjectStore":
    from obstore.store import from_url

    options: Any = {"timeout": _TIMEOUT, "connect_timeout": timedelta(seconds=5), "allow_http": True}
    return from_url(str(reference), client_options=options, retry_config={"max_retries": 3, "retry_timeout": _TIMEOUT})


def _listed(store: "ObjectStore", endings: tuple[str, ...]) -> list[_Object]:
    """Returns the files of the model, in the order of their names."""
    import obstore

    found = obstore.list_with_delimiter(store)["objects"]
    return sorted(
        (
            _Object(one["path"], one["size"], one["e_tag"] or str(one["last_modified"]))
            for one in found
            if one["path"].endswith(endings) and not one["path"].startswith("consolidated")
        ),
        key=lambda one: one.name,
    )


def _version_of(objects: Iterable[_Object]) -> str:
    """Returns a name that changes with any of the files."""
    text = "\n".join(f"{one.name} {one.size} {one.version}" for one in objects)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fetched_before(reference: ModelReference, own: Path, error: Exception) -> Path:
    """Returns the newest folder that was fetched from a bucket which does not answer now. Raises Unavailable without one."""
    folders = [path for path in own.glob("*") if path.is_dir() and path.suffix != ".part"]
    if not folders:
        raise Unavailable(
            f"{reference} cannot be listed, and was not fetched before: {_first_line(error)}. Check the address and the "
            "credentials (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and their like)."
        ) from error
    newest = max(folders, key=lambda path: path.stat().st_mtime)
    logger.warning("%s cannot be listed (%s); what was fetched from it before is served", reference, _first_line(error))
    return newest


def _fetch(reference: ModelReference, store: "ObjectStore", objects: list[_Object], folder: Path) -> None:
    """Fetches files side by side into a folder beside `folder`, which gets its name when all are whole."""
    from obstore.exceptions import BaseError

    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ThreadPoolExecutor(_FILES_AT_ONCE) as pool,
    ):
        task = progress.add_task(f"Fetching {reference}", total=sum(one.size for one in objects))
        copies = [pool.submit(_copy, store, one, part, _advance(progress, task)) for one in objects]
        try:
            for copy in copies:
                copy.result()
        except (BaseError, OSError) as error:
            for copy in copies:
                copy.cancel()
            raise Unavailable(f"{reference} could not be fetched: {_first_line(error)}. Try again.") from error
    part.rename(folder)


def _advance(progress: Progress, task: TaskID) -> Callable[[int], None]:
    return lambda num_bytes: progress.advance(task, num_bytes)


def _copy(store: "ObjectStore", one: _Object, folder: Path, advance: Callable[[int], None]) -> None:
    import obstore

    written = 0
    with (folder / one.name).open("xb") as file:
        for chunk in obstore.get(store, one.name).stream(min_chunk_size=_MIN_CHUNK_BYTES):
            file.write(chunk)
            written += len(chunk)
            advance(len(chunk))
    if written != one.size:
        raise OSError(f"{one.name} has {one.size} bytes in the bucket, and {written} came")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
