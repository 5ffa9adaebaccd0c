"""Declares which rows of the platform's own tables are in an export, and why the others are not."""

import json
import zlib
from typing import Any

from graftwork.platform.alerts.tables import BudgetAlertRow, WebhookRow
from graftwork.platform.batches.tables import BatchAnswerRow, BatchRow, FileRow
from graftwork.platform.exports.sections import Section, text_of
from graftwork.platform.exports.tables import ExportRow
from graftwork.platform.ledger.tables import MonthlySpendRow, UsageRow, UsageSumRow
from graftwork.platform.people.tables import RoleGrantRow
from graftwork.platform.prices.tables import PriceListRow
from graftwork.platform.retention.tables import RetentionRow
from graftwork.platform.tenancy.tables import (
    ApiKeyRow,
    AuditRow,
    IdempotencyRow,
    OwnerQuotaRow,
    QuotaRow,
    TenantRow,
)
from graftwork.platform.tracing.tables import RequestTraceRow

_GATEWAY = {"gateway": "names a process of the server, and nothing of the tenant"}


def _timeline(body: bytes) -> Any:
    return json.loads(zlib.decompress(body))


FILES = Section("files", FileRow)
PLATFORM_SECTIONS = (
    Section("tenant", TenantRow, owner="id"),
    Section("roles", RoleGrantRow, owner="granted_on"),
    Section("keys", ApiKeyRow, withheld={"key_hash": "whoever has it can test guesses of the key"}),
    Section("limits", QuotaRow),
    Section("limits_of_keys_and_users", OwnerQuotaRow),
    Section("prices", PriceListRow),
    Section("webhook", WebhookRow, owner="owner_id"),
    Section("budget_alerts", BudgetAlertRow),
    Section("audit", AuditRow),
    Section("usage", UsageRow),
    Section("usage_sums", UsageSumRow),
    Section("monthly_spend", MonthlySpendRow),
    Section("timelines", RequestTraceRow, decoders={"body": _timeline}),
    Section("idempotency_keys", IdempotencyRow, owner="owner", decoders={"body": text_of}, withheld=_GATEWAY),
    FILES,
    Section("batches", BatchRow, withheld=_GATEWAY),
    Section("batch_answers", BatchAnswerRow, decoders={"body": text_of}),
    Section("retention", RetentionRow),
    Section("exports", ExportRow, withheld=_GATEWAY),
)
LEFT_OUT = {
    "access_changes": "counts the changes of all tenants' access",
    "adapter_artifacts": "has the digests of all tenants' files; those of the tenant are in adapters/versions",
    "data_keys": "has the keys that encrypt the tenant's files on the server's disk; the archive has the files themselves",
    "degraded_modes": "is the operator's, and the same for all tenants",
    "engine_demands": "is about engines",
    "engine_reports": "is what engines counted, to check the ledger; the tenant's usage is in usage",
    "gateways": "is about the server's processes",
    "organisations": "is the operator's; the tenant's row has the id of its organisation",
    "people": "has people of all tenants; the audit log has what a person did in the tenant",
    "replicas": "is about engines",
    "spent_sign_ins": "has digests of sign-ins that were used, of nobody in particular",
    "trace_switches": "is the operator's; what was traced is in timelines",
    "usage_rollup_state": "counts how far the sums of all tenants are",
    "usage_unrolled": "names rows of usage that are not yet in usage_sums",
}
"""The tables of which an export has nothing, with the reason for each."""
