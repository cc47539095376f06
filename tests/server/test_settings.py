"""A replica that is a new interpreter is told by command line what a forked one is told in memory."""

from __future__ import annotations

from dataclasses import fields

import pytest

from functions.server.settings import Settings


def test_every_setting_survives_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the token, which travels by environment; each is another than its default."""
    told = Settings(
        kind="generate", exchange="/x y", job="j", name="n", options={"a": [1, "ü"]}, threads=3, heartbeat_s=0.5,
        grace_s=7.5, scratch="/s", token="secret", function="critic", leased=True, stuck_s=9.0,
    )  # fmt: skip
    plain = Settings(kind="", exchange="", job="", name="")
    assert [f.name for f in fields(Settings) if getattr(told, f.name) == getattr(plain, f.name)] == []
    words = told.command_line()
    assert "secret" not in words
    monkeypatch.setenv("RLHF_TOKEN", told.token)
    assert Settings.from_command_line(words)[0] == told
