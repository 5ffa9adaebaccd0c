r"""Computes the digest that identifies an adapter.

The digest depends on what the adapter computes, not on the form of its files. Never opens a file: the caller passes the
content. Never decides whether an adapter is valid: `layout.py` does.
Invariant: two uploads have the same digest exactly if they have the same base model, the same modules with the same
scales, and bit-identical tensors. Caches use the digest as their key, so equal digests must mean equal results.

Tensor names, the order of keys, padding and metadata do not change the digest. The digest is also the same whether the
file has q, k and v as one fused tensor or as three tensors.

    sha256( b"graftwork adapter 1\n" ‖ length of table: u64 LE ‖ table: canonical JSON ‖ tensors in the table's order )
"""

import hashlib
import json
import re

from graftwork.adapters.format.adapter_spec import AdapterSpec, ExpertSpec, ModuleSpec
from graftwork.adapters.format.layout import parse_adapter
from graftwork.adapters.format.safetensors_file import Readable, TensorEntry
from graftwork.engine.core.stats import EngineDescription

_DOMAIN = b"graftwork adapter 1\n"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def is_digest(text: str) -> bool:
    """Returns whether `text` has the form of a digest: `sha256:` and 64 hex digits. Such a text is safe in a file path."""
    return _DIGEST.fullmatch(text) is not None


def adapter_digest(spec: AdapterSpec, weights: Readable, base_fingerprint: str) -> str:
    """Returns the digest of an adapter, as `sha256:…`. `weights` is the content of the weights file.

    The hash begins with a table of the shapes of all tensors, so two different adapters never give the hash the same
    input.
    """
    return digest_behind(digest_prefix(spec, base_fingerprint), spec, weights)


def digest_prefix(spec: AdapterSpec, base_fingerprint: str) -> bytes:
    """Returns the first part of the hash's input: everything before the tensors.

    Two adapters have the same prefix if they differ only in the values of their tensors.
    """
    table = json.dumps(_table(spec, base_fingerprint), sort_keys=True, separators=(",", ":")).encode()
    return _DOMAIN + len(table).to_bytes(8, "little") + table


def digest_behind(prefix: bytes, spec: AdapterSpec, weights: Readable) -> str:
    """Hashes `prefix` and then the tensors of the adapter. Returns the digest, as `sha256:…`.

    `prefix` is the result of `digest_prefix` for the same `spec`. `weights` is the content of the weights file.
    """
    digest = hashlib.sha256(prefix)
    view = memoryview(weights)
    for entry in spec.entries:
        digest.update(view[entry.start : entry.end])
    return f"sha256:{digest.hexdigest()}"


def identify_adapter(config: bytes, weights: Readable, description: EngineDescription) -> tuple[AdapterSpec, str]:
    """Validates the two files of an upload. Returns the validated adapter and its digest.

    Raises ValidationFailed if a file is wrong.
    """
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
    if spec.experts:
        table["experts"] = [_expert_row(part) for part in spec.experts]
    return table


def _expert_row(part: ExpertSpec) -> list[object]:
    return [part.layer, part.target, part.expert, part.rank, part.scale.hex(), *_form(part.A), *_form(part.B)]


def _row(module: ModuleSpec) -> list[object]:
    row = [module.layer, module.target, module.rank, module.scale.hex(), *_form(module.A), *_form(module.B)]
    if module.magnitude is not None:
        row += ["magnitude", *_form(module.magnitude)]
    if module.bias is not None:
        row += ["bias", *_form(module.bias)]
    return row


def _form(entry: TensorEntry) -> list[object]:
    return [entry.dtype, list(entry.shape)]
