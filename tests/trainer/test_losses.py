"""Every loss of the registry against a naive float64 reading of its formula, one sequence and one token at a time."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from configs.load import ConfigError
from tests.trainer.helpers import flat_batch, given, settings, step_loss
from trainer.losses.catalogue import CATALOGUE
from trainer.losses.policy import FUNCTIONS
from trainer.losses.step import StepLoss

Row = list[tuple[float, float, float, bool]]  # (log mu, log pi - log mu, advantage, trainable)

rows_strategy = st.lists(
    st.lists(
        st.tuples(
            st.floats(-4, -0.125, width=32),
            st.floats(-0.875, 0.875, width=32),
            st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=5,
)


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def reference(name: str, rows: list[Row]) -> tuple[float, list[list[float]]]:
    """(loss, dloss/dlog pi) as written in the papers, with global denominators. SAT has its own tests."""
    chosen = settings(name)
    eps_low, eps_high, p = chosen.clip_low, chosen.clip_high, chosen.parameters
    active = [[t for t in row if t[3]] for row in rows]
    means = [statistics.fmean(t[1] for t in row) if row else 0.0 for row in active]
    n_tokens, n_sequences = sum(map(len, active)), sum(1 for row in active if row)
    squares = sorted(t[1] ** 2 for row in active for t in row)
    kept_squares = [s for i, s in enumerate(squares) if statistics.fmean(squares[: i + 1]) < 0.04]
    loss, gradients = 0.0, []
    for row, mean in zip(rows, means, strict=True):
        count = sum(t[3] for t in row)
        gradient, s = [], math.exp(mean)
        # The gradient of GSPO reaches every token of the sequence, in parts of 1 / count.
        s_gradient = sum(
            t[2] * s for t in row if t[3] and min(s * t[2], clip(s, 1 - eps_low, 1 + eps_high) * t[2]) == s * t[2]
        )
        for m, d, a, trainable in row:
            if not trainable:
                gradient.append(0.0)
                continue
            r, log_pi = math.exp(d), m + d
            if name in ("grpo", "dr-grpo", "dapo"):
                value = min(r * a, clip(r, 1 - eps_low, 1 + eps_high) * a)
                slope = r * a if value == r * a else 0.0
            elif name in ("gspo", "gspo-token"):
                value = min(s * a, clip(s, 1 - eps_low, 1 + eps_high) * a)
                slope = (s * a if value == s * a else 0.0) if name == "gspo-token" else s_gradient / count
            elif name == "cispo":
                slope = clip(r, 1 - eps_low, 1 + eps_high) * a
                value = slope * log_pi
            elif name == "tis":
                slope = min(r, 2.0) * a
                value = slope * log_pi
            elif name in ("icepop", "mis"):
                slope = r * a if 0.5 <= r <= 5 else 0.0
                value = slope * log_pi
            elif name == "geo-rs":
                slope = a if 0.99 <= s <= 1.01 else 0.0
                value = slope * log_pi
            elif name == "decoupled-ppo":
                value = slope = r * a
            else:
                moved = math.exp(log_pi) - math.exp(m)
                kept = {
                    "m2po": d**2 in kept_squares,
                    "dppo-tv": not ((a > 0 and moved > p.get("delta", 0)) or (a < 0 and moved < -p.get("delta", 0))),
                    "opsm": not (a < 0 and -mean > p.get("delta", 0)),
                    "estr": d**2 / (1.0 + p.get("epsilon", 0)) <= p.get("threshold", 0),
                }[name]
                value = slope = r * a if kept else 0.0
            weight = {
                "token-mean": 1 / n_tokens,
                "sequence-mean": 1 / (count * n_sequences),
                "constant": 1 / (n_sequences * chosen.constant_length),
            }[chosen.aggregation]
            loss -= value * weight
            gradient.append(-slope * weight)
        gradients.append(gradient)
    return loss, gradients


def on_an_edge(rows: list[Row]) -> bool:
    """Whether float32 and float64 may decide differently."""
    edges = [0.8, 1.2, 1.28, 2.0, 0.5, 5.0, 0.99, 1.01, 1 - 3e-4, 1 + 4e-4, math.exp(-0.1)]
    values = [math.exp(t[1]) for row in rows for t in row if t[3]]
    values += [math.exp(statistics.fmean(a)) for row in rows if (a := [t[1] for t in row if t[3]])]
    squares = [math.exp(s) for s in (t[1] ** 2 for row in rows for t in row)]
    moved = [math.exp(t[0] + t[1]) - math.exp(t[0]) for row in rows for t in row]
    return (
        any(abs(v - e) < 1e-5 for v in values for e in edges)
        or any(abs(abs(m) - 0.15) < 1e-5 for m in moved)
        or any(abs(math.log(s) / 1.01 - 0.1) < 1e-5 for s in squares)
    )


@pytest.mark.parametrize("name", sorted(n for n, e in CATALOGUE.items() if not e.sat))
@given(rows=rows_strategy)
def test_a_loss_and_its_gradient_equal_the_naive_reading(name: str, rows: list[Row]) -> None:
    squares = sorted(t[1] ** 2 for row in rows for t in row if t[3])
    near_mean = any(abs(statistics.fmean(squares[: i + 1]) - 0.04) < 1e-5 for i in range(len(squares)))
    if on_an_edge(rows) or (name == "m2po" and (near_mean or len(set(squares)) < len(squares))):
        return
    batch = flat_batch(
        [[t[0] for t in row] for row in rows],
        [[t[2] for t in row] for row in rows],
        [[t[3] for t in row] for row in rows],
    )
    log_probs = torch.tensor([t[0] + t[1] for row in rows for t in row], dtype=torch.float64).float()
    if not batch.loss_mask.any():
        expected_loss, expected = 0.0, [[0.0] * len(row) for row in rows]
    else:
        expected_loss, expected = reference(name, rows)
    loss, gradients, _ = step_loss(settings(name), [batch], [log_probs])
    assert loss == pytest.approx(expected_loss, rel=2e-5, abs=2e-6)
    assert gradients[0].tolist() == pytest.approx([g for row in expected for g in row], rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
@pytest.mark.parametrize("how", ["token-mean", "sequence-mean", "constant"])
def test_the_step_is_the_same_under_any_micro_batching(name: str, how: Any) -> None:
    moved = [[0.1, -0.2], [0.5], [0.0, 0.3, -0.6], [0.05, 0.01]]
    advantages = [[1.0, 1.0], [-1.0], [0.5] * 3, [2.0, 2.0]]
    mask = [[True, True], [True], [True, False, True], [False, False]]
    outcomes = []
    for parts in ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 2], [], [0, 1]]):
        batches = [
            flat_batch(
                [[-1.0] * len(moved[i]) for i in p], [advantages[i] for i in p], [mask[i] for i in p], padding=len(p)
            )
            for p in parts
        ]
        log_probs = [torch.tensor([-1.0 + d for i in p for d in moved[i]] + [0.0] * len(p)) for p in parts]
        loss, gradients, _ = step_loss(settings(name, aggregation=how), batches, log_probs)
        by_sequence: dict[int, list[float]] = {}
        for p, g in zip(parts, gradients, strict=True):
            at = 0
            for i in p:
                by_sequence[i] = g[at : at + len(moved[i])].tolist()
                at += len(moved[i])
        outcomes.append((loss, [x for i in range(4) for x in by_sequence[i]]))
    for loss, gradient in outcomes[1:]:
        assert loss == pytest.approx(outcomes[0][0], rel=1e-6)
        assert gradient == pytest.approx(outcomes[0][1], rel=1e-6)


@pytest.mark.parametrize("name", sorted(CATALOGUE))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_whatever_a_masked_position_holds_never_leaks(name: str, bad: float) -> None:
    mask = [[True, False, True], [False]]
    clean = flat_batch([[-1.0, 0.0, -2.0], [0.0]], [[1.0, 0.0, -1.0], [0.0]], mask)
    dirty = flat_batch([[-1.0, bad, -2.0], [bad]], [[1.0, bad, -1.0], [bad]], mask)
    expected = step_loss(settings(name), [clean], [torch.tensor([-0.9, 0.0, -2.3, 0.0])])
    found = step_loss(settings(name), [dirty], [torch.tensor([-0.9, bad, -2.3, bad])])
    assert found[0] == expected[0]
    assert torch.equal(found[1][0], expected[1][0])
    assert math.isfinite(found[0])
    assert torch.isfinite(found[1][0]).all()


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_huge_log_ratio_makes_no_infinity(name: str) -> None:
    batch = flat_batch([[-90.0, -1.0]], [[-1.0, 1.0]])
    loss, gradients, _ = step_loss(settings(name), [batch], [torch.tensor([-0.01, -95.0])])
    assert math.isfinite(loss)
    assert torch.isfinite(gradients[0]).all()


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    batch = flat_batch([[-3.0]], [[-1.0]])
    options = {"parameters": {"dual_clip": 3.0}}
    loss, gradients, _ = step_loss(settings("grpo", **options), [batch], [torch.tensor([-1.0])])
    assert loss == pytest.approx(3.0)
    assert gradients[0].tolist() == [0.0]
    unbounded, _, _ = step_loss(settings("grpo"), [batch], [torch.tensor([-1.0])])
    assert unbounded == pytest.approx(math.exp(2))


def test_an_entropy_bonus_lowers_the_loss_by_its_share() -> None:
    batch = flat_batch([[-1.0, -1.0]], [[1.0, 1.0]], [[True, False]])
    plain, _, _ = step_loss(settings("grpo"), [batch], [torch.tensor([-1.0, -1.0])])
    with_bonus, _, _ = step_loss(settings("grpo", entropy_coefficient=0.1), [batch], [torch.tensor([-1.0, -1.0])])
    assert with_bonus == pytest.approx(plain - 0.1)


def test_a_constant_length_without_the_constant_aggregation_is_refused() -> None:
    with pytest.raises(ConfigError, match="constant_length has no effect: grpo is aggregated by"):
        settings("grpo", constant_length=64)
    assert settings("grpo", constant_length=64, aggregation="constant").constant_length == 64


def test_an_unknown_loss_or_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean sat-grpo"):
        settings("sat-grp")
    with pytest.raises(ConfigError, match=r"trainer\.loss\.parameters\.kap.*Did you mean cap"):
        settings("tis", parameters={"kap": 2.0})


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("grpo", {"dual_clip": 0.5}, r"dual_clip = 0.5 is not above 1 \+ clip_high = 1.2"),
        ("icepop", {"low": 2.0}, "from low = 2 to high = 5 does not hold 1"),
        ("geo-rs", {"high": 0.995}, "does not hold 1"),
        ("tis", {"cap": 0.0}, "cap = 0 has to be above 0"),
        ("m2po", {"threshold": -1.0}, "threshold = -1 has to be above 0"),
    ],
)
def test_a_parameter_that_would_take_every_gradient_away_is_refused(
    name: str, parameters: dict[str, float], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(name, parameters=parameters)


def test_every_function_of_the_registry_has_a_word_and_every_word_a_function() -> None:
    assert {entry.function for entry in CATALOGUE.values()} == set(FUNCTIONS)


def test_the_reference_penalty_is_the_k3_estimate_with_its_gradient_whatever_the_micro_batching() -> None:
    chosen = settings("grpo", reference_kl=0.5)
    behaviour, log_probs = [[-1.0, -2.0], [-0.5]], [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5])]
    reference = [[-1.2, -1.0], [float("nan")]]  # where the reference knows nothing, it says nothing
    plain = flat_batch(behaviour, [[0.0, 0.0], [0.0]])
    whole = replace(plain, reference_log_probs=torch.tensor([x for row in reference for x in row]))
    parts = [
        replace(flat_batch([b], [[0.0] * len(b)]), reference_log_probs=torch.tensor(r))
        for b, r in zip(behaviour, reference, strict=True)
    ]
    distance = [-1.2 + 1.0, -1.0 + 2.0, 0.0]
    want = 0.5 * sum(math.exp(x) - x - 1 for x in distance) / 3
    slope = [0.5 * (1 - math.exp(x)) / 3 for x in distance]
    one = step_loss(chosen, [whole], [torch.cat(log_probs)])
    two = step_loss(chosen, parts, log_probs)
    for loss, gradients, reports in (one, two):
        assert loss == pytest.approx(want, rel=1e-5)
        assert torch.cat(gradients).tolist() == pytest.approx(slope, rel=1e-5, abs=1e-9)
        assert sum(float(r["reference_kl"].sum()) for r in reports) == pytest.approx(2 * 3 * want, rel=1e-5)
    with pytest.raises(ValueError, match="reference_log_probs"):
        step_loss(chosen, [plain], [torch.cat(log_probs)])


@pytest.mark.parametrize("name", ["sat-grpo", "sat-gspo", "m2po"])
def test_a_step_of_one_micro_batch_is_measured_on_its_own_forward_pass_to_the_same_loss(name: str) -> None:
    torch.manual_seed(1)
    batch = flat_batch([[-1.0] * 30, [-2.0] * 9], [[1.0] * 30, [-1.0] * 9], padding=3)
    log_probs = batch.behaviour_log_probs + 0.4 * torch.randn(batch.tokens)
    chosen = settings(name)
    want, gradients, _ = step_loss(chosen, [batch], [log_probs])
    loss, leaf = StepLoss(chosen), log_probs.clone().requires_grad_()
    value, _ = loss(batch, leaf, torch.ones(batch.tokens))
    value.backward()
    assert float(value.detach()) == want
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradients[0])
    assert loss.context.gate is not None or loss.context.threshold is not None
    with pytest.raises(ValueError, match="several micro-batches"):
        loss(flat_batch([[-1.0]], [[1.0]]), torch.zeros(1), torch.zeros(1))
