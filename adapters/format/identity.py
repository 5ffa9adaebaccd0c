"""Computes the identity of an adapter: a digest of what it computes, independent of the form of its files.

Two uploads have the same digest exactly if the engine would compute the same with them: same base, same modules, same
scales, same bits in every factor, magnitude, bias and saved matrix. Tensor names, the order of keys, padding and
metadata do not count, nor whether q, k and v are one tensor or three.
Caches use the digest as their key, so equal digests must always mean equal results.

    sha256( b"graftwork adapter 1\\n" ‖ length of table: u64 LE ‖ table: canonical JSON ‖ tensors in the table's order )
"""

import hashlib
import json
import re

from graftwork.adapters.format.adapter_spec import AdapterSpec, ModuleSpec
from graftwork.adapters.format.layout import parse_adapter
from graftwork.adapters.format.safetensors_file import Readable, TensorEntry
from graftwork.engine.core.stats import EngineDescription

_DOMAIN = b"graftwork adapter 1\n"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def is_digest(text: str) -> bool:
    """Returns whether `text` has the form of a digest, and so is safe as part of a path."""
    return _DIGEST.fullmatch(text) is not None


def adapter_digest(spec: AdapterSpec, weights: Readable, base_fingerprint: str) -> str:
    """Returns `sha256:…`. The table contains every length, so two different adapters never hash the same bytes."""
    return digest_behind(digest_prefix(spec, base_fingerprint), spec, weights)


def digest_prefix(spec: AdapterSpec, base_fingerprint: str) -> bytes:
    """Returns the bytes that are hashed before the tensors. They are equal for all adapters of one layout."""
    table = json.dumps(_table(spec, base_fingerprint), sort_keys=True, separators=(",", ":")).encode()
    return _DOMAIN + len(table).to_bytes(8, "little") + table


def digest_behind(prefix: bytes, spec: AdapterSpec, weights: Readable) -> str:
    """Hash the tensors after a prefix that was made from this spec, and return the digest."""
    digest = hashlib.sha256(prefix)
    view = memoryview(weights)
    for entry in spec.entries:
        digest.update(view[entry.start : entry.end])
    return f"sha256:{digest.hexdigest()}"


def identify_adapter(config: bytes, weights: Readable, description: EngineDescription) -> tuple[AdapterSpec, str]:
    """Validate an adapter's files and compute its identity. This is all the work of an upload. Raises ValidationFailed."""
    spec = parse_adapter(config, weights, description)
    return spec, adapter_digest(spec, weights, description.fingerprint)


def _table(spec: AdapterSpec, base_fingerprint: str) -> dict[str, object]:
    """Returns the table that is hashed for the digest.

    Optional parts are written only if present, so a new kind of part changes no old digest.
    """
    table: dict[str, object] = {"base": base_fingerprint, "modules": [_row(module) for module in spec.modules]}
    if spec.biases:
        table["biases"] = [[part.layer, part.target, *_form(part.bias)] for part in spec.biases]
    if spec.saved:
        table["saved"] = [[part.target, *_form(part.matrix)] for part in spec.saved]
    return table


def _row(module: ModuleSpec) -> list[object]:
    row = [module.layer, module.target, module.rank, module.scale.hex(), *_form(module.A), *_form(module.B)]
    if module.magnitude is not None:
        row += ["magnitude", *_form(module.magnitude)]
    if module.bias is not None:
        row += ["bias", *_form(module.bias)]
    return row


def _form(entry: TensorEntry) -> list[object]:
    return [entry.dtype, list(entry.shape)]
