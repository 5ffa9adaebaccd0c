"""A judge of schemas over a byte vocabulary, and the folder of the public suites."""

from pathlib import Path

import pytest
from benchmarks.suite_cases import Judge, data_folder


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="session")
def data() -> Path:
    folder = data_folder()
    if folder is None:
        pytest.skip("the suites are not beside the project: set GRAFTWORK_TEST_DATA to their folder")
    return folder
