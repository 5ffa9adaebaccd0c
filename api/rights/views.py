"""Shows exports and retentions as answers. Never reads the database."""

from graftwork.platform.answers import data_rights as answers
from graftwork.platform.exports.export import Export


def export_answer(export: Export) -> answers.Export:
    failure = export.failure
    return answers.Export(
        id=export.id,
        tenant_id=export.tenant_id,
        status=export.status.value,
        created_at=int(export.created_at),
        started_at=_seconds(export.started_at),
        ended_at=_seconds(export.ended_at),
        expires_at=_seconds(export.expires_at),
        rows=export.num_rows,
        bytes=export.size_bytes,
        sha256=export.sha256,
        error=None if failure is None else answers.ExportError(code=failure.code, message=failure.message),
    )


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
