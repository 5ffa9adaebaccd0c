"""Tests of what the engine's process does before it serves."""

import logging

import pytest

from graftwork.api.server.engine_process import warn_of_former_settings
from graftwork.platform.settings.settings import Settings


def test_a_former_setting_is_read_and_the_log_names_the_new_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting of one part's kernels still counts, with a warning that names `kernels`; without one there is none."""
    for name in ("LORA_KERNELS", "ROW_KERNELS", "ATTENTION_BACKEND", "KERNELS"):
        monkeypatch.delenv(f"GRAFTWORK_{name}", raising=False)
    monkeypatch.setenv("GRAFTWORK_ATTENTION_BACKEND", "torch")
    settings = Settings.from_environment({"kernels": "native"})

    with caplog.at_level(logging.WARNING):
        warn_of_former_settings(settings)
        warn_of_former_settings(Settings(kernels="torch"))

    (record,) = caplog.records
    assert record.message == "former_setting"
    assert record.__dict__["setting"] == "attention_backend"
    assert record.__dict__["use_instead"] == "kernels"
    assert (settings.attention_backend, settings.lora_kernels, settings.kernels) == ("torch", None, "native")
