r"""Computes the digest that identifies an adapter.

The digest depends on what the adapter computes, not on the form of its files. Never reads a file, and never checks an
adapter.
Invariant: two uploads have the same digest exactly if they have the same base, modules and scales, and the same bits in
every factor, magnitude, bias and saved matrix. Caches use the digest as their key, so equal digests must mean equal
results. Tensor names, the order of keys, padding and metadata have no effect on the digest. It also makes no difference
whether q, k and v are one tensor or three.

    sha256( b"graftwork adapter 1\n" ‖ length of table: u64 LE ‖ table: canonical JSON ‖ tensors in the table's order )
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
    """Returns whether `text` has the form of a digest. Such a text is safe as part of a path."""
    return _DIGEST.fullmatch(text) is not None


def adapter_digest(spec: AdapterSpec, weights: Readable, base_fingerprint: str) -> str:
    """Returns the digest of an adapter, as `sha256:…`. `weights` is the whole weights file.

    The hashed table contains every length, so two different adapters never hash the same bytes.
    """
    return digest_behind(digest_prefix(spec, base_fingerprint), spec, weights)


def digest_prefix(spec: AdapterSpec, base_fingerprint: str) -> bytes:
    """Returns the bytes that are hashed before the tensors.

    They are the same for all adapters that differ only in the values of their tensors.
    """
    table = json.dumps(_table(spec, base_fingerprint), sort_keys=True, separators=(",", ":")).encode()
    return _DOMAIN + len(table).to_bytes(8, "little") + table


def digest_behind(prefix: bytes, spec: AdapterSpec, weights: Readable) -> str:
    """Hashes the tensors of `spec` after `prefix`, and returns the digest.

    `digest_prefix` made the prefix from the same spec.
    """
    digest = hashlib.sha256(prefix)
    view = memoryview(weights)
    for entry in spec.entries:
        digest.update(view[entry.start : entry.end])
    return f"sha256:{digest.hexdigest()}"


def identify_adapter(config: bytes, weights: Readable, description: EngineDescription) -> tuple[AdapterSpec, str]:
    """Validates the two files of an upload, and computes the adapter's digest. Raises ValidationFailed."""
    spec = parse_adapter(config, weights, description)
    return spec, adapter_digest(spec, weights, description.fingerprint)


def _table(spec: AdapterSpec, base_fingerprint: str) -> dict[str, object]:
    """Returns the table that is hashed for the digest.

    Optional parts are written only if present, so a new kind of part does not change existing digests.
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
