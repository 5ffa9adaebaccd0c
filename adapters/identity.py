"""The identity of an adapter: a digest over what it does, whatever its files look like.

Two uploads share a digest exactly when the engine would compute the same with them: same base, same modules, same
scales, same bits in every factor. Names of tensors, order of keys, padding and metadata do not count.
Everything cached under an adapter is keyed by this, so it may never be weaker than that sentence.

    sha256( b"graftwork adapter 1\\n" ‖ length of table: u64 LE ‖ table: canonical JSON ‖ A, B of each module in order )
"""

import hashlib
import json
import re

from graftwork.adapters.checkpoint import AdapterSpec, parse_adapter
from graftwork.engine.request import EngineDescription

_DOMAIN = b"graftwork adapter 1\n"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def is_digest(text: str) -> bool:
    """Whether `text` has the form of a digest, and so is safe as part of a path."""
    return _DIGEST.fullmatch(text) is not None


def adapter_digest(spec: AdapterSpec, weights: bytes, base_fingerprint: str) -> str:
    """`sha256:…`; the table fixes every length, so no two adapters can share a byte stream."""
    table = json.dumps(_table(spec, base_fingerprint), sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(_DOMAIN + len(table).to_bytes(8, "little") + table)
    view = memoryview(weights)
    for module in spec.modules:
        for entry in (module.A, module.B):
            digest.update(view[entry.start : entry.end])
    return f"sha256:{digest.hexdigest()}"


def identify_adapter(config: bytes, weights: bytes, description: EngineDescription) -> tuple[AdapterSpec, str]:
    """Validate an adapter's files and name what they are: all the work an upload costs. Raises ValidationFailed."""
    spec = parse_adapter(config, weights, description)
    return spec, adapter_digest(spec, weights, description.fingerprint)


def _table(spec: AdapterSpec, base_fingerprint: str) -> dict[str, object]:
    modules = [
        [module.layer, module.target, module.rank, module.scale.hex()]
        + [part for entry in (module.A, module.B) for part in (entry.dtype, list(entry.shape))]
        for module in spec.modules
    ]
    return {"base": base_fingerprint, "modules": modules}
