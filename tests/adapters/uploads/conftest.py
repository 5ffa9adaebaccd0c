"""Two tenants that upload in parts, on SQLite and then on PostgreSQL."""

import pytest

from tests.adapters.registry.conftest import two_tenants
from tests.adapters.registry.two_tenants import TwoTenants
from tests.adapters.uploads.two_uploaders import TwoUploaders

__all__ = ["two_tenants"]


@pytest.fixture
def uploaders(two_tenants: TwoTenants) -> TwoUploaders:
    return TwoUploaders(two_tenants)
