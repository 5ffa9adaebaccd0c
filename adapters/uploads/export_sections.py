"""Declares which rows of uploads in parts, and of fetches, are in an export. Bytes that are still on their way are not."""

from graftwork.adapters.uploads.tables import AdapterUploadRow
from graftwork.platform.exports.sections import Section

UPLOADS = Section(
    "adapters/uploads",
    AdapterUploadRow,
    withheld={
        "source": "may hold a signature, with which anybody can fetch the adapter",
        "lease_owner": "names a process of the server, and nothing of the tenant",
    },
)
