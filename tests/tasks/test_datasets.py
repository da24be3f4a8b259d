"""Rows are found by index alone, mixed by weight, and named when they are malformed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.datasets import BadRow, FiniteMixture, Mixture, row_of
from rollout.tasks.source import OneSource, Source, SourceSettings

GOOD = {"question": "1+1?", "answer": "2"}


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@given(rows=st.integers(1, 300), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000))
def test_every_epoch_holds_every_row_once(rows: int, seed: int, epoch: int) -> None:
    found = [row_of(epoch * rows + at, rows, seed) for at in range(rows)]
    assert sorted(found) == list(range(rows))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(row_of(e * 50 + i, 50, s) for i in range(50)) for e in range(4) for s in range(4)}
    assert len(orders) == 16


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), seed=st.integers(0, 100))
def test_a_mixture_keeps_its_weights_and_leaves_out_no_row(weights: list[float], seed: int) -> None:
    mixture = Mixture.of(weights, seed)
    places = [mixture.place(index) for index in range(2 * len(mixture.pattern))]
    for source, weight in enumerate(weights):
        own = [at for which, at in places if which == source]
        assert own == list(range(len(own)))
        share = len(own) / len(places)
        assert abs(share - weight / sum(weights)) <= len(weights) / 1000 + 1e-9


@given(
    sources=st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 1500)), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_a_mixture_that_ends_gives_every_row_once_and_has_one_end(sources: list[tuple[float, int]], seed: int) -> None:
    lengths = [length for _, length in sources]
    endless = Mixture.of([weight for weight, _ in sources], seed)
    mixture = FiniteMixture.of(endless, lengths)
    places = [mixture.place(index) for index in range(sum(lengths))]
    assert sorted(places) == [(source, at) for source, length in enumerate(lengths) for at in range(length)]
    assert places[: mixture.mixed] == [endless.place(index) for index in range(mixture.mixed)]
    for beyond in (0, 1, 999):
        with pytest.raises(IndexError):
            mixture.place(sum(lengths) + beyond)


def test_a_malformed_row_is_named_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, '{"question": ', GOOD])
    with pytest.raises(BadRow, match=r"a\.jsonl, line 2: "):
        Source.of(SourceSettings(path=str(path)), 0)


@pytest.mark.parametrize("bad", [[1], {"question": "x"}, {"answer": "2"}, {"question": " ", "answer": "2"}, "nothing"])
def test_malformed_rows_are_skipped_and_counted_when_told_to(tmp_path: Path, bad: object) -> None:
    path = write(tmp_path / "a.jsonl", [GOOD, bad, GOOD])
    source = Source.of(SourceSettings(path=str(path), malformed="skip"), 0)
    assert (source.rows, source.skipped) == (2, 1)


def test_sources_are_mixed_and_named(tmp_path: Path) -> None:
    sources: list[OneSource] = [
        {"path": str(write(tmp_path / f"{name}.jsonl", [{"problem": name, "answer": "1"}] * 3)), "weight": weight}
        for name, weight in (("algebra", 3), ("geometry", 1))
    ]
    source = Source.of(SourceSettings(sources=sources), 0)
    seen = Counter(source.prompt(index).source for index in range(1000))
    assert seen == {"algebra": 750, "geometry": 250}


def test_epochs_end_the_prompts(tmp_path: Path) -> None:
    source = Source.of(SourceSettings(path=str(write(tmp_path / "a.jsonl", [GOOD] * 3)), epochs=2), 0)
    assert source.prompt(5) == source.prompt(5)
    with pytest.raises(IndexError, match="2 epochs of a end before prompt 6"):
        source.prompt(6)


def test_one_epoch_of_two_files_has_every_row_of_both_whatever_their_weights(tmp_path: Path) -> None:
    sources: list[OneSource] = []
    for name, weight in (("few", 9), ("many", 1)):
        rows = [{"problem": f"{name} {i}", "answer": "1"} for i in range(3 if name == "few" else 40)]
        sources.append({"path": str(write(tmp_path / f"{name}.jsonl", rows)), "weight": weight})
    source = Source.of(SourceSettings(sources=sources, epochs=1), 0)
    seen = {source.prompt(index).messages[0]["content"] for index in range(43)}
    assert len(seen) == 43
    with pytest.raises(IndexError, match="few, many end before prompt 43"):
        source.prompt(43)


def test_a_pass_rate_chooses_and_orders_rows(tmp_path: Path) -> None:
    rows = [{"problem": str(rate), "answer": "1", "rate": rate} for rate in (0.0, 0.3, 0.9, 0.6, 1.0)]
    settings = SourceSettings(
        path=str(write(tmp_path / "a.jsonl", rows)), pass_rate_field="rate", pass_rate=(0.1, 0.95), order="easy-first"
    )
    source = Source.of(settings, 0)
    assert [source.prompt(i).messages[0]["content"] for i in range(3)] == ["0.9", "0.6", "0.3"]
