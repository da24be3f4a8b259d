"""Variables that guard the monitor: what cannot be had is one message, and nothing is open by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError
from services.http import switched_on
from services.monitor.main import PROTECT_READS, reads_need_token, run
from tests.weight_sync.live import config


@pytest.mark.parametrize("word", ["true", "yes", "on", "2"])
def test_a_word_that_somebody_may_mean_as_yes_is_refused_and_not_taken_for_no(word: str) -> None:
    with pytest.raises(ConfigError, match="Set it to 1"):
        switched_on("SWITCH", {"SWITCH": word})


def test_a_switch_is_on_by_1_alone() -> None:
    assert switched_on("SWITCH", {"SWITCH": "1"})
    assert not any(switched_on("SWITCH", words) for words in ({}, {"SWITCH": ""}, {"SWITCH": "0"}))


def test_reads_that_are_to_be_guarded_without_a_token_are_not_left_open() -> None:
    assert not reads_need_token(None, {})
    assert reads_need_token("s3cret", {PROTECT_READS: "1"})
    with pytest.raises(ConfigError, match="LAGRANGE_API_TOKEN"):
        reads_need_token(None, {PROTECT_READS: "1"})


def test_the_monitor_does_not_start_unguarded(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAGRANGE_API_TOKEN", raising=False)
    monkeypatch.setenv(PROTECT_READS, "1")
    assert run(config(redis_url, tmp_path)) == 2
