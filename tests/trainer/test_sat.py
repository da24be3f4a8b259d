"""SAT against its float64 oracle and the properties that its specification proves."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from configs.schema import SatSection
from tests.trainer.helpers import flat_batch, given, settings, step_loss
from trainer.losses.catalogue import CATALOGUE, warnings
from trainer.losses.policy import FUNCTIONS, StepContext
from trainer.losses.sat import Gate, contraction, measure_gate, one_radius
from trainer.losses.tokens import Denominators, tokens_of

ORACLE = json.loads((Path(__file__).parent / "sat_token.json").read_text())
KERNELS = ("hill", "hill_shift", "gauss", "laplace")

kernels = st.sampled_from(KERNELS)
sat_sections = st.builds(
    SatSection,
    alpha=st.floats(0.05, 0.95),
    kernel=kernels,
    scale=st.sampled_from(["quantile", "mad"]),
    exponent=st.floats(0.5, 6),
    width=st.floats(0.2, 4),
    floor=st.sampled_from([0.0, 0.0, 0.3]),
)
tokens_strategy = st.lists(
    st.tuples(st.floats(-2, 2, width=32), st.floats(-8, 0, width=32), st.sampled_from([-1.5, -1.0, 0.0, 0.7, 2.0])),
    min_size=1,
    max_size=40,
)


def evaluate(name: str, batch: Any, log_probs: torch.Tensor, **options: Any) -> tuple[Any, torch.Tensor]:
    """The objective of one micro-batch with scope global, and dJ/dlog_prob of each token (own sums, no mean)."""
    chosen = settings(name, **options)
    leaf = log_probs.clone().requires_grad_()
    tokens = tokens_of(batch, leaf)
    gate = measure_gate([tokens], chosen.sat, sequence=chosen.entry.sequence) if chosen.entry.sat else None
    objective = FUNCTIONS[chosen.entry.function](tokens, chosen, StepContext(Denominators(1, 1), gate))
    torch.where(tokens.active, objective.values, 0.0).sum().backward()
    assert leaf.grad is not None
    return objective, leaf.grad


def drawn(tokens: list[tuple[float, float, float]]) -> tuple[Any, torch.Tensor]:
    batch = flat_batch([[t[1] for t in tokens]], [[t[2] for t in tokens]])
    return batch, torch.tensor([t[1] + t[0] for t in tokens], dtype=torch.float32)


@pytest.mark.parametrize(
    "case", ORACLE["cases"], ids=lambda c: f"{c['adv']}-{c['kernel']}-{c['alpha']}-{c['eps_high']}"
)
def test_every_figure_of_the_oracle_is_met(case: dict[str, Any]) -> None:
    batch = flat_batch([ORACLE["logmu"]], [case["adv_values"]], dtype=torch.float64)
    log_probs = torch.tensor(ORACLE["logp"], dtype=torch.float64)
    sat = SatSection(alpha=case["alpha"], kernel=case["kernel"], floor=case["floor"])
    options = {"clip_low": case["eps_low"], "clip_high": case["eps_high"], "sat": sat}
    objective, gradient = evaluate("sat-grpo", batch, log_probs, **options)
    gate = measure_gate([tokens_of(batch, log_probs)], sat, sequence=False)
    assert gate.quantile == pytest.approx(case["q"], rel=1e-12)
    c_minus, c_plus, _ = contraction((log_probs - batch.behaviour_log_probs), gate, sat)
    close = partial(pytest.approx, rel=1e-9, abs=1e-12)
    assert c_plus.tolist() == close(case["c_plus"])
    assert c_minus.tolist() == close(case["c_minus"])
    assert (1 - objective.radius_low).tolist() == close(case["lo"])
    assert (1 + objective.radius_high).tolist() == close(case["hi"])
    assert objective.values.tolist() == close(case["J"])
    assert gradient.tolist() == close(case["grad"])
    assert objective.clipped.int().tolist() == case["clipped"]
    plus, minus = one_radius(gate, sat, case["eps_low"], case["eps_high"])
    assert plus == pytest.approx(case["d_star_plus"], rel=1e-6)
    assert minus == pytest.approx(case["d_star_minus"], rel=1e-6)
    total, _, _ = step_loss(settings("sat-grpo", **options), [batch], [log_probs])
    assert total == pytest.approx(case["loss_token_mean"], rel=1e-9)


@pytest.mark.parametrize(("q", "radius"), [(0.01, 0.0261), (0.02, 0.0405), (0.05, 0.0703), (0.1, 0.1052)])
def test_the_effective_radius_of_the_hill_kernel_is_that_of_the_specification(q: float, radius: float) -> None:
    plus, _ = one_radius(Gate(q, q), SatSection(), 0.2, 0.2)
    assert math.expm1(plus) == pytest.approx(radius, abs=5e-5)


@given(tokens_strategy, sat_sections, st.floats(0.01, 0.5), st.floats(0.01, 0.9))
def test_the_interval_contains_one_and_lies_in_the_plain_one(
    tokens: list[tuple[float, float, float]], sat: SatSection, low: float, high: float
) -> None:
    objective, _ = evaluate("sat-grpo", *drawn(tokens), sat=sat, clip_low=low, clip_high=high)
    assert ((objective.radius_low >= 0) & (objective.radius_low <= torch.tensor(low))).all()
    assert ((objective.radius_high >= 0) & (objective.radius_high <= torch.tensor(high))).all()


@given(tokens_strategy, sat_sections, st.sampled_from(["grpo", "gspo"]))
def test_sat_is_pointwise_at_most_ppo(tokens: list[tuple[float, float, float]], sat: SatSection, peer: str) -> None:
    options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
    adaptive, _ = evaluate("sat-" + peer, *drawn(tokens), sat=sat, **options)
    plain, _ = evaluate(peer, *drawn(tokens), **options)
    assert (adaptive.values <= plain.values).all()


@given(tokens_strategy, sat_sections)
def test_ordinary_and_pull_back_tokens_equal_ppo_bit_for_bit(
    tokens: list[tuple[float, float, float]], sat: SatSection
) -> None:
    batch, log_probs = drawn(tokens)
    adaptive, gradient = evaluate("sat-grpo", batch, log_probs, sat=sat)
    plain, plain_gradient = evaluate("grpo", batch, log_probs)
    d = log_probs - batch.behaviour_log_probs
    same = ~adaptive.gated | (batch.advantages * d < 0)
    assert torch.equal(adaptive.values[same], plain.values[same])
    assert torch.equal(gradient[same], plain_gradient[same])


@given(tokens_strategy, st.sampled_from(["sat-grpo", "sat-gspo"]))
def test_without_a_gate_the_plain_losses_come_back_bit_for_bit(
    tokens: list[tuple[float, float, float]], name: str
) -> None:
    batch, log_probs = drawn(tokens)
    options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
    chosen = settings(name, **options)
    leaf = log_probs.clone().requires_grad_()
    objective = FUNCTIONS["clipped"](tokens_of(batch, leaf), chosen, StepContext(Denominators(1, 1), Gate(0.0, 0.0)))
    objective.values.sum().backward()
    plain, gradient = evaluate(name.removeprefix("sat-"), batch, log_probs, **options)
    assert torch.equal(objective.values, plain.values)
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, gradient)


@given(tokens_strategy, sat_sections)
def test_the_gradient_is_that_of_one_batch_wide_radius(
    tokens: list[tuple[float, float, float]], sat: SatSection
) -> None:
    batch, log_probs = drawn(tokens)
    log_probs, batch = (
        log_probs.double(),
        flat_batch([[t[1] for t in tokens]], [[t[2] for t in tokens]], dtype=torch.float64),
    )
    _, gradient = evaluate("sat-grpo", batch, log_probs, sat=sat)
    plus, minus = one_radius(measure_gate([tokens_of(batch, log_probs)], sat, sequence=False), sat, 0.2, 0.2)
    d = log_probs - batch.behaviour_log_probs
    near = ((d - plus).abs() < 1e-7) | ((d + minus).abs() < 1e-7)  # on the edge itself either side may win by rounding
    clipped = ((batch.advantages > 0) & (d > plus)) | ((batch.advantages < 0) & (d < -minus))
    expected = torch.where(clipped, 0.0, d.exp() * batch.advantages)
    assert torch.allclose(gradient[~near], expected[~near], rtol=1e-12, atol=0)


@given(st.integers(1, 12), st.floats(-2, 2, width=32), kernels, st.sampled_from(["quantile", "mad"]))
def test_all_log_ratios_equal_is_ppo(n: int, d: float, kernel: Any, scale: Any) -> None:
    behaviour = [-2.0] * n
    batch = flat_batch([behaviour], [[1.0] * n])
    log_probs = torch.full((n,), -2.0 + d)
    sat = SatSection(kernel=kernel, scale=scale)
    adaptive, gradient = evaluate("sat-grpo", batch, log_probs, sat=sat)
    plain, plain_gradient = evaluate("grpo", batch, log_probs)
    assert torch.equal(adaptive.values, plain.values)
    assert torch.equal(gradient, plain_gradient)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", ["quantile", "mad"])
def test_a_zero_quantile_switches_sat_off_and_is_counted(kernel: Any, scale: Any) -> None:
    d = [0.0] * 19 + [1.0]
    batch = flat_batch([[-2.0] * 20], [[1.0] * 20])
    log_probs = torch.tensor([-2.0 + x for x in d])
    objective, _ = evaluate("sat-grpo", batch, log_probs, sat=SatSection(kernel=kernel, scale=scale))
    plain, _ = evaluate("grpo", batch, log_probs)
    assert torch.equal(objective.values, plain.values)
    assert not objective.gated.any()


def test_a_median_of_zero_as_scale_makes_no_nan() -> None:
    d = [0.0] * 6 + [0.1, 0.2, 0.3, 0.4]
    batch = flat_batch([[-2.0] * 10], [[1.0] * 10])
    log_probs = torch.tensor([-2.0 + x for x in d])
    for kernel in KERNELS:
        sat = SatSection(kernel=kernel, scale="mad", alpha=0.8)
        objective, gradient = evaluate("sat-grpo", batch, log_probs, sat=sat)
        assert torch.isfinite(objective.values).all()
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["sat-grpo", "sat-gspo"])
@pytest.mark.parametrize("scope", ["global", "lagged", "microbatch"])
def test_an_empty_mask_and_an_empty_micro_batch_give_zero(name: str, scope: Any) -> None:
    empty = flat_batch([], [], padding=0)
    masked = flat_batch([[-1.0, math.nan]], [[1.0, 1.0]], [[False, False]], padding=2)
    log_probs = [torch.zeros(0), torch.tensor([math.nan, -math.inf, 0.0, math.nan])]
    loss, gradients, _ = step_loss(settings(name, sat=SatSection(scope=scope)), [empty, masked], log_probs)
    assert loss == 0
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_prob_that_is_not_finite_leaves_mask_and_denominator_and_is_counted(bad: float) -> None:
    rows, log_probs = [-1.0, -1.2, -0.7, -2.0], torch.tensor([-0.5, -1.0, -0.9, -2.2])
    clean = flat_batch([rows], [[1.0, -1.0, 0.5, 2.0]])
    spoilt = flat_batch([[*rows, bad]], [[1.0, -1.0, 0.5, 2.0, 1.0]])
    for name in ("sat-grpo", "sat-gspo", "grpo"):
        expected, gradient, _ = step_loss(settings(name), [clean], [log_probs])
        loss, spoilt_gradient, _ = step_loss(settings(name), [spoilt], [torch.cat([log_probs, torch.tensor([-1.0])])])
        assert loss == expected
        assert torch.equal(spoilt_gradient[0], torch.cat([gradient[0], torch.zeros(1)]))
    assert int(tokens_of(spoilt, torch.zeros(5)).nonfinite) == 1


def test_bfloat16_log_probs_are_cast_before_they_are_subtracted() -> None:
    batch = flat_batch([[-1.0009, -2.003]], [[1.0, 1.0]])
    half = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    tokens = tokens_of(batch, half)
    assert tokens.log_ratio.dtype == torch.float32
    assert tokens.log_ratio.tolist() == pytest.approx([0.0009, 0.003], rel=1e-3)


def test_one_interval_covers_a_sequence_and_its_gradient_is_spread_over_its_tokens() -> None:
    """dJ_i/dl_it = 1[not clipped] s_i A_i / |y_i|, summed here over the sequence's |y_i| copies of J_i."""
    behaviour = [[-1.0, -1.0], [-1.0, -1.0, -1.0], [-2.0]]
    advantages = [[1.0, 1.0], [-1.0] * 3, [2.0]]
    batch = flat_batch(behaviour, advantages)
    moved = [0.3, 0.1, -0.4, -0.2, 0.1, 0.02]
    log_probs = torch.tensor([m + b for m, b in zip(moved, [-1.0] * 5 + [-2.0], strict=True)])
    sat = SatSection(alpha=0.5, quantile_weight="sequence")
    chosen = settings("sat-gspo", sat=sat)
    _, gradients, reports = step_loss(chosen, [batch], [log_probs])
    means = [0.2, -1 / 6, 0.02]
    q = sorted(abs(m) for m in means)[1]
    kept = 1 / (1 + (0.2 / q) ** 2)
    assert math.exp(0.2) > 1 + 0.2 * kept  # so the first sequence is clipped
    assert math.exp(0.2) > 1.2
    expected = [0.0] * 2 + [math.exp(-1 / 6) * 1.0 / 3 / 3] * 3 + [-math.exp(0.02) * 2 / 3]
    assert gradients[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert reports[0]["gated"].tolist() == [True, True, False, False, False, False]


def test_the_sequence_quantile_counts_tokens_or_sequences() -> None:
    batch = flat_batch([[-1.0] * 9, [-1.0]], [[1.0] * 9, [1.0]])
    tokens = tokens_of(batch, torch.tensor([-0.9] * 9 + [0.0]))
    by_token = measure_gate([tokens], SatSection(alpha=0.5), sequence=True)
    by_sequence = measure_gate([tokens], SatSection(alpha=0.5, quantile_weight="sequence"), sequence=True)
    assert by_token.quantile == pytest.approx(0.1, rel=1e-5)
    assert by_sequence.quantile == pytest.approx(0.55, rel=1e-5)


def test_one_sequence_in_a_micro_batch_never_fires_and_the_global_scope_does() -> None:
    batches = [flat_batch([[-1.0] * 3], [[1.0] * 3]) for _ in range(4)]
    log_probs = [torch.full((3,), -1.0 + d) for d in (0.01, 0.02, 0.05, 0.15)]
    fired = {}
    for scope in ("microbatch", "global"):
        sat = SatSection(scope=scope, alpha=0.6)
        _, _, reports = step_loss(settings("sat-gspo", sat=sat), batches, log_probs)
        fired[scope] = [bool(r["newly_clipped"].any()) for r in reports]
    assert fired == {"microbatch": [False] * 4, "global": [False, False, False, True]}


def test_the_lagged_scope_uses_the_gate_of_the_step_before() -> None:
    batch = flat_batch([[-1.0] * 4], [[1.0] * 4])
    log_probs = torch.tensor([-0.99, -0.98, -0.95, -0.85])
    lagged = settings("sat-grpo", sat=SatSection(scope="lagged"))
    first, _, _ = step_loss(lagged, [batch], [log_probs])
    plain, _, _ = step_loss(settings("grpo"), [batch], [log_probs])
    later, _, _ = step_loss(lagged, [batch], [log_probs], previous=Gate(0.02, 0.02))
    assert first == plain
    assert later > plain


@given(st.lists(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=6), min_size=1, max_size=8), st.data())
def test_the_step_is_the_same_however_sequences_lie_in_micro_batches(
    moved: list[list[float]], data: st.DataObject
) -> None:
    advantages = [[data.draw(st.sampled_from([-1.0, 0.5, 2.0]))] * len(m) for m in moved]
    cut = data.draw(st.integers(0, len(moved)))
    for name in ("sat-grpo", "sat-gspo"):
        for how in ("token-mean", "sequence-mean", "constant"):
            results = []
            for parts in ([range(len(moved))], [range(cut), range(cut, len(moved))]):
                batches = [flat_batch([[-2.0] * len(moved[i]) for i in p], [advantages[i] for i in p]) for p in parts]
                log_probs = [torch.tensor([-2.0 + x for i in p for x in moved[i]]) for p in parts]
                loss, gradients, reports = step_loss(settings(name, aggregation=how), batches, log_probs)
                results.append((loss, torch.cat(gradients), torch.cat([r["gated"] for r in reports])))
            assert results[0][0] == pytest.approx(results[1][0], rel=1e-5, abs=1e-6)
            assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-7)
            assert torch.equal(results[0][2], results[1][2])


def test_settings_that_make_sat_inert_are_warned_about() -> None:
    assert not warnings(settings("sat-gspo"))
    assert "floor" in warnings(settings("sat-grpo", sat=SatSection(floor=0.1)))[0]
    assert "radii" in warnings(settings("sat-gspo", clip_low=3e-4, clip_high=4e-4))[0]
    assert "micro-batch" in warnings(settings("sat-gspo", sat=SatSection(scope="microbatch")))[0]
    assert "does not clip" in warnings(settings("tis", clip_high=0.3))[0]
    assert "no effect on grpo" in warnings(settings("grpo", sat=SatSection(alpha=0.5)))[0]
    assert not any(warnings(settings(name)) for name in CATALOGUE)
