"""Trajectories that people can read are bounded, and whatever a model writes is text in the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from broker.types import Group, Trajectory, VersionRun
from rollout.codec import FileCodec
from rollout.samples import KEPT, PER_VERSION, SampleLog, read_samples, readable
from services.local.report_people import evaluations, samples
from services.queue_cli.show import COLOURS, spoken
from tests.rollout.helpers import tiny_folder


def group(codec: FileCodec, version: int, number: int = 0) -> Group:
    ids = np.asarray(codec.encode("12>4"), np.int32)
    t = Trajectory(
        prompt_ids=np.asarray(codec.encode("37<"), np.int32),
        response_ids=ids,
        log_probs=np.zeros(4, np.float32),
        loss_mask=np.asarray([True, True, False, True]),
        versions=(VersionRun(0, 1, version), VersionRun(1, 3, version + 1)),
        reward=0.5,
        finish="stop",
    )
    return Group("r", number, number, 1, "t", "w", "e", 2, 0.0, (t, structs.replace(t, reward=1.0)))


def test_pieces_tell_versions_and_the_environment_apart(tmp_path: Path) -> None:
    codec = FileCodec(tiny_folder(tmp_path))
    record = readable(group(codec, 3), codec)
    assert record["samples"][0]["pieces"] == [(3, "1"), (4, "2"), (None, ">"), (4, "4")]
    assert (record["prompt"], record["rewards"], record["version"]) == ("37<", [0.5, 1.0], 3)


def test_a_group_says_how_many_samples_were_left_out_of_it(tmp_path: Path) -> None:
    codec = FileCodec(tiny_folder(tmp_path))
    whole = group(codec, 3)
    assert readable(whole, codec)["missing"] == 0
    assert readable(replace(whole, samples_wanted=5), codec)["missing"] == 3


def test_a_log_keeps_a_few_groups_of_each_version_and_no_more_than_two_files(tmp_path: Path) -> None:
    codec = FileCodec(tiny_folder(tmp_path))
    log = SampleLog(tmp_path / "samples" / "w0.jsonl", codec)
    for version in range(3 * KEPT):
        assert [log.note(group(codec, version, n)) for n in range(4)] == [True] * PER_VERSION + [False] * 2
    files = list((tmp_path / "samples").iterdir())
    assert len(files) == 2
    assert all(len(path.read_text().splitlines()) <= KEPT for path in files)
    assert [record["version"] for record in read_samples(tmp_path, 3)] == [3 * KEPT - 2, 3 * KEPT - 1, 3 * KEPT - 1]
    for _ in range(3):  # a worker that is started again and again
        SampleLog(tmp_path / "samples" / "w0.jsonl", codec).note(group(codec, 0))
        again = SampleLog(tmp_path / "samples" / "w0.jsonl", codec)
        for version in range(KEPT // 4):
            again.note(group(codec, version))
            again.note(group(codec, version))
    files = list((tmp_path / "samples").iterdir())
    assert len(files) == 2
    assert all(len(path.read_text().splitlines()) <= KEPT for path in files)
    blocked = SampleLog(files[0] / "below-a-file" / "w0.jsonl", codec)
    with pytest.raises(OSError, match="below-a-file"):
        blocked.note(group(codec, 0))


def test_the_terminal_shows_what_was_said_by_whom_and_how_old_it_is(tmp_path: Path) -> None:
    codec = FileCodec(tiny_folder(tmp_path))
    shown = spoken(group(codec, 3), codec, 5)
    assert shown.plain.startswith("37<\n\nsample 0: reward 0.5, lag 2, stop\n12>4")
    at = shown.plain.index("12>4")
    styles = [next(str(s.style) for s in shown.spans if s.start <= at + i < s.end) for i in range(4)]
    assert styles == [COLOURS[3], COLOURS[4], "dim", COLOURS[4]]


def test_what_is_written_down_says_how_far_behind_it_was(tmp_path: Path) -> None:
    codec = FileCodec(tiny_folder(tmp_path))
    log = SampleLog(tmp_path / "samples" / "w0.jsonl", codec)
    assert log.note(group(codec, 3), 5)
    assert log.note(group(codec, 4))
    assert [record.get("lag") for record in read_samples(tmp_path, 9)] == [2, None]
    assert "version 3, lag 2 when it was submitted" in samples(tmp_path)


def test_the_report_escapes_what_models_write(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    record = {"version": 1, "prompt": "<script>", "samples": [{"reward": 1, "pieces": [[1, "<img src=x>"]]}]}
    (folder / "w0.jsonl").write_text(json.dumps(record) + "\n{broken")
    page = samples(tmp_path)
    assert "&lt;script&gt;" in page
    assert "<img" not in page
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    line = {"label": "<b>", "version": 7, "step": 7, "evaluation_lag": 2, "avg@8": score}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"evaluation": line}) + "\n")
    assert "avg@8 0.500 (0.400 to 0.600)" in evaluations(tmp_path)
    assert "<b>" not in evaluations(tmp_path)
    assert samples(tmp_path / "nothing") == evaluations(tmp_path / "nothing") == ""
