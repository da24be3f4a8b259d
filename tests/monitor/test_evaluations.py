"""Evaluations and samples over HTTP: what the evaluator handed in and what the workers wrote down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from httpx import ASGITransport, AsyncClient

from broker.types import NEWEST
from services.monitor.app import create_app
from services.monitor.samples import samples
from services.monitor.source import Source
from tests.monitor.conftest import SCORE, Run, record, write_samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_samples(tmp_path)
    return tmp_path


async def get(run: Run, path: str, folder: Path | None = None) -> Any:
    app = create_app(Source(run.broker), folder=folder)
    async with AsyncClient(transport=ASGITransport(app), base_url="http://monitor") as http:
        answer = await http.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json() if path.startswith("/v1") else answer.text


async def test_results_are_on_the_page_in_the_answers_in_prometheus_and_in_the_log(run: Run) -> None:
    for version in (0, 1):
        run.broker.evaluated(record(version), f"aime24 avg@8 0.5, version {version}", 30.0)
    run.broker.evaluated(record(1, "gsm8k"), "gsm8k", 30.0)
    found = (await get(run, "/v1/evaluations"))["evaluations"]
    assert [(e["task"], e["version"], e["evaluation_lag"]) for e in found] == [
        ("gsm8k", 1, 1),
        ("aime24", 1, 1),
        ("aime24", 0, 1),
    ]
    assert found[1]["scores"] == {"avg@8": SCORE}
    assert (await get(run, "/v1/overview"))["evaluations"] == found
    text = await get(run, "/metrics")
    assert 'lagrange_evaluation_score{bound="low",score="avg@8",task="aime24"} 0.4' in text
    assert 'lagrange_evaluation_version{task="aime24"} 1.0' in text
    assert (await get(run, "/v1/events"))["events"][1]["text"] == "aime24 avg@8 0.5, version 1"
    page = await get(run, "/")
    assert "<td>gsm8k</td>" in page[page.index('id="evaluations"') : page.index('id="samples"')]


async def test_a_record_that_is_no_evaluation_is_left_out_and_harms_nothing(run: Run) -> None:
    for nonsense in ({}, {"label": 7, "avg": {"low": "x"}}, {**record(1), "version": "new"}):
        run.broker.evaluated(nonsense, "nonsense", 30.0)
    run.broker.evaluated(record(1), "aime24", 30.0)
    for path in ("/v1/evaluations", "/v1/overview"):
        assert [e["task"] for e in (await get(run, path))["evaluations"]] == ["aime24"]
    assert "lagrange_evaluation_score" in await get(run, "/metrics")


async def test_samples_are_the_newest_groups_with_their_lag_and_whose_text_it_is(run: Run, folder: Path) -> None:
    found = (await get(run, "/v1/samples?limit=2", folder))["groups"]
    assert [(g["version"], g["lag"], g["group_id"]) for g in found] == [(2, 0, str(2**60 + 2)), (1, 1, str(2**60 + 1))]
    assert found[0]["samples"][0]["pieces"] == [{"version": 2, "text": "2"}, {"version": None, "text": "?"}]
    assert (await get(run, "/v1/samples"))["groups"] == []


async def test_samples_without_a_reward_are_counted_beside_the_others_with_what_was_raised(
    run: Run, folder: Path
) -> None:
    assert (await get(run, "/v1/samples", folder))["unrewarded"] == {"judged": 0, "failed": 0, "newest": ""}
    counts: dict[str, float | int | str] = {
        "samples_rewarded": 6.0,
        "reward_failures": 2.0,
        f"reward_failures{NEWEST}": "ValueError: <no> answer",
    }
    run.broker.heartbeat_worker("worker-0", counts)
    found = await get(run, "/v1/samples", folder)
    assert found["unrewarded"] == {"judged": 8, "failed": 2, "newest": "ValueError: <no> answer"}
    assert [g["missing"] for g in found["groups"]] == [2, 0, 0]


async def test_a_sample_that_is_newer_than_the_snapshot_is_not_shown_yet(run: Run, folder: Path) -> None:
    seen = replace(run.broker.snapshot(), version=1)
    assert [group.version for group in samples(seen, folder, 2).groups] == [1, 0]


def test_a_record_of_a_sample_that_is_none_hides_no_other(run: Run, folder: Path) -> None:
    with (folder / "samples" / "worker-0.jsonl").open("a") as file:
        for broken in ('"samples": 7', '"samples": [7]', '"samples": [], "prompt_index": "x"', '"rewards": {}'):
            file.write(f'{{"group": 1, "version": 1, {broken}}}\n')
    assert len(samples(run.broker.snapshot(), folder, 9).groups) == 3
