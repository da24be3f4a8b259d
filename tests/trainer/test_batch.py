"""Packing: positions, budgets, balance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from tests.trainer.helpers import given, packed, padding_share, sample, trajectory
from trainer.batch import RouteShape, balance, check_routes, first_fit, plan, spread_routes


def test_each_position_predicts_the_next_token_of_its_own_sequence() -> None:
    first = trajectory([1, 2, 3], [4, 5], log_probs=[-0.4, -0.5], mask=[True, False], versions=[(0, 1, 6), (1, 1, 7)])
    second = trajectory([6], [7, 8, 9], log_probs=[-0.7, -0.8, -0.9], versions=[(0, 3, 8)])
    b = packed([sample(first, 2.0), sample(second, [1.0, -1.0, 3.0])], pad_multiple=4)
    assert b.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]
    assert b.labels.tolist() == [2, 3, 4, 5, 0, 7, 8, 9, 0, 0, 0, 0]
    assert b.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert b.sequence_starts.tolist() == [0, 5, 9]
    assert b.sequence_index.tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert b.segments().tolist() == [0] * 5 + [1] * 4 + [2] * 3
    # Token 4 is the first response token: position 2 predicts it, and its log-prob, version and advantage lie there.
    assert b.loss_mask.tolist() == [False, False, True, False, False, True, True, True, False, False, False, False]
    expected = [0, 0, -0.4, -0.5, 0, -0.7, -0.8, -0.9, 0, 0, 0, 0]
    assert b.behaviour_log_probs.tolist() == pytest.approx(expected)
    assert b.versions.tolist() == [-1, -1, 6, 7, -1, 8, 8, 8, -1, -1, -1, -1]
    assert b.advantages.tolist() == [0, 0, 2, 2, 0, 1, -1, 3, 0, 0, 0, 0]


def test_a_routing_trace_lies_on_the_rows_whose_forward_made_it_and_the_last_row_is_spread() -> None:
    routes = np.array([[[3, 1]], [[0, 2]], [[1, 0]]], np.uint8)
    b = packed([sample(trajectory([1, 2], [3, 4], routes=routes))], route_shape=RouteShape(1, 2, 4), pad_multiple=8)
    assert b.routes is not None
    assert b.routes_valid is not None
    assert b.routes[:3, 0].tolist() == [[3, 1], [0, 2], [1, 0]]
    assert b.routes_valid.tolist() == [True] * 3 + [False] * 5
    made_up = b.routes[3:]
    assert len(set(made_up.flatten().tolist())) == 4
    assert (made_up[..., 0] != made_up[..., 1]).all()


def test_no_routes_are_carried_without_replay_or_without_any_trace() -> None:
    routes = np.zeros((3, 1, 1), np.uint8)
    assert packed([sample(trajectory([1, 2], [3, 4], routes=routes))]).routes is None
    bare = packed([sample(trajectory([1, 2], [3, 4]))], route_shape=RouteShape(1, 1, 4))
    assert bare.routes is None
    assert bare.routes_valid is None


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((3, 2, 2)), "the model has 3 layers"),
        (np.array([[[0, 9]]]), "expert 9"),
        (np.array([[[1, 1]]]), "twice"),
    ],
)
def test_a_trace_that_does_not_fit_the_model_is_refused(routes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_routes(routes, RouteShape(1 if routes.shape[1] == 1 else 3, 2, 4))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_made_up_routes_name_distinct_experts_and_use_all_of_them(rows: int, layers: int, k: int, more: int) -> None:
    routes = spread_routes(rows, RouteShape(layers, k, k + more))
    check_routes(routes, RouteShape(layers, k, k + more))
    assert len(np.unique(routes)) == min(k + more, rows * k)


@pytest.mark.parametrize(("experts", "bytes_each"), [(256, 1), (257, 2)])
def test_packed_routes_take_no_more_bytes_than_their_experts_need(experts: int, bytes_each: int) -> None:
    last = np.full((3, 1, 2), experts - 1, np.uint16) - np.array([0, 1], np.uint16)
    routes = packed([sample(trajectory([1, 2], [3, 4], routes=last))], route_shape=RouteShape(1, 2, experts)).routes
    assert routes is not None
    assert routes.element_size() == bytes_each
    assert routes[:3, 0].tolist() == [[experts - 1, experts - 2]] * 3


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_balance_keeps_every_item_once_and_stays_near_the_mean(weights: list[int], bins: int) -> None:
    parts = balance(weights, bins)
    assert sorted(i for p in parts for i in p) == list(range(len(weights)))
    loads = [sum(weights[i] for i in p) for p in parts]
    assert max(loads) <= sum(weights) / bins + max(weights, default=0)


@given(st.lists(st.integers(1, 120), max_size=60), st.integers(1, 100))
def test_first_fit_keeps_the_budget_unless_one_item_alone_breaks_it(weights: list[int], budget: int) -> None:
    parts = first_fit(weights, budget)
    assert sorted(i for p in parts for i in p) == list(range(len(weights)))
    assert all(sum(weights[i] for i in p) <= budget or len(p) == 1 for p in parts)


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(8, 100), st.integers(0, 9))
def test_every_rank_gets_the_number_of_micro_batches_of_the_fullest(lengths: list[int], budget: int, most: int) -> None:
    samples = [sample(trajectory([1], [2] * n)) for n in lengths]
    parts = plan(samples, budget, lambda own: max(own, most))
    assert sorted(i for p in parts for i in p) == list(range(len(samples)))
    assert len(parts) >= max(most, 1)
    assert all(sum(samples[i].trajectory.tokens for i in p) <= budget or len(p) == 1 for p in parts)


def test_padding_of_a_long_tailed_batch_stays_below_five_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 1.0, 200).clip(2, 4000).astype(int)
    samples = [sample(trajectory([1], [2] * int(n))) for n in lengths]
    parts = plan(samples, 8192)
    batches = [packed([samples[i] for i in p], pad_multiple=8) for p in parts]
    assert padding_share(batches) < 0.05


def test_an_empty_micro_batch_has_no_rows() -> None:
    b = packed([], pad_multiple=8)
    assert (b.tokens, b.sequences) == (0, 0)
    assert b.segments().shape == (0,)
    assert torch.equal(b.sequence_starts, torch.tensor([0], dtype=torch.int32))


def test_a_trace_of_a_model_with_dense_layers_is_checked_and_laid_out_by_its_routing_layers() -> None:
    shape = RouteShape(3, 2, 4, (True, False, True))
    routing = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 0], [1, 3]]], np.uint8)
    whole = np.zeros((3, 3, 2), np.uint8)  # what an engine reports for a dense layer is no trace: zeros here
    whole[:, [0, 2]] = routing
    rows = [
        packed([sample(trajectory([1, 2], [3, 4], routes=routes))], route_shape=shape).routes
        for routes in (routing, whole)
    ]
    assert rows[0] is not None
    assert rows[1] is not None
    assert torch.equal(rows[0], rows[1])
    assert np.array_equal(rows[0][:3, [0, 2]].numpy(), routing)
    whole[1, 2] = [3, 3]
    with pytest.raises(ValueError, match="twice"):
        check_routes(whole, shape)
    with pytest.raises(ValueError, match=r"3 layers \(2 with experts\)"):
        check_routes(np.zeros((3, 1, 2), np.uint8), shape)


@pytest.mark.parametrize("ranks", [1, 4])
def test_at_most_a_twentieth_is_padding_and_micro_batches_are_full_for_long_tailed_lengths(ranks: int) -> None:
    random = np.random.default_rng(0)
    budget = 16384
    lengths = np.clip(random.lognormal(6.5, 1.0, 256), 8, budget).astype(int).tolist()
    shares = balance(lengths, ranks)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) < 1.02 * sum(loads) / ranks
    rows = 0
    for share in shares:
        samples = [sample(trajectory([1], [2] * (lengths[i] - 1))) for i in share]
        parts = plan(samples, budget)
        batches = [packed([samples[i] for i in part], pad_multiple=8) for part in parts]
        assert all(b.tokens <= budget for b in batches)
        assert padding_share(batches) < 0.01
        rows += len(batches) * budget
    assert sum(lengths) > 0.95 * rows - ranks * budget  # nearly full, but for the last micro-batch of each rank
