"""Losses, statistics, log-probs and replay on a pretended GPU: no tensor is left on the CPU, and the numbers are the
same; and what a rank sets before CUDA starts. The whole model: tests/trainer_megatron/test_pretended_gpu.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import RunConfig
from tests.conftest import ConfigFactory
from tests.trainer.helpers import flat_batch, settings
from tests.trainer.on_gpu import pretend_gpu
from tests.trainer_megatron import data
from trainer.batch import MicroBatch
from trainer.losses.catalogue import CATALOGUE, LossSettings
from trainer.losses.step import StepLoss
from trainer.main import prepare_for_gpu
from trainer.megatron import parallel
from trainer.megatron.replay import LayerReplay, RoutingReplay, plan_routes
from trainer.megatron.scores import token_scores
from trainer.statistics import step_statistics

BATCH = replace(
    flat_batch([[-1.0, -2.0, -0.5], [-3.0, -0.1], [-1.5]], [[1.0, 1.0, 1.0], [-1.0, -1.0], [0.5]], padding=2),
    versions=torch.tensor([0, 0, 1, 1, 1, 0, -1, -1], dtype=torch.int32),
    reference_log_probs=torch.tensor([-1.1, -1.9, -0.6, -2.8, -0.2, -1.4, 0.0, 0.0]),
)
LOG_PROBS = torch.tensor([-1.2, -1.4, -0.6, -2.2, -0.3, -1.1, 0.0, 0.0])
ENTROPY = torch.full((8,), 0.7)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda there, here: there + here,
        lambda there, here: torch.where(there > 0, there, here),
        lambda there, here: torch.cat([there, here]),
        lambda there, here: there.index_add(0, torch.zeros(2, dtype=torch.int64), there),
        lambda there, here: there.gather(0, torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_the_pretended_gpu_refuses_a_tensor_of_the_cpu(wrong: Any) -> None:
    with pretend_gpu() as device, pytest.raises(RuntimeError, match="same device"):
        wrong(torch.ones(2, device=device), torch.ones(2))


def test_the_pretended_gpu_takes_numbers_and_indexes_of_the_cpu() -> None:
    with pretend_gpu() as device:
        values = torch.arange(4.0).to(device)
        values[1:] += torch.tensor(2.0)
        assert values[torch.tensor([0, 3])].tolist() == [0.0, 5.0]
        assert values.cpu().device.type == "cpu"


def loss_and_gradient(
    chosen: LossSettings, batch: MicroBatch, log_probs: Tensor, sum_over: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    scores = log_probs.clone().requires_grad_()
    loss, report = StepLoss(chosen, sum_over=sum_over)(batch, scores, ENTROPY.to(batch.token_ids.device))
    loss.backward()
    assert scores.grad is not None
    return loss.detach().cpu(), scores.grad.cpu(), {name: value.cpu() for name, value in report.items()}


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_loss_computes_where_its_batch_lies(name: str) -> None:
    sat: dict[str, Any] = {"sat": {"scope": "global"}} if CATALOGUE[name].sat else {}
    chosen = settings(name, reference_kl=0.1, entropy_coefficient=0.01, **sat)
    want = loss_and_gradient(chosen, BATCH, LOG_PROBS, lambda counts: counts.clone())
    with pretend_gpu() as device:  # sums over ranks come back on the device, as those of Parallel.sum_over_data
        got = loss_and_gradient(chosen, BATCH.to(device), LOG_PROBS.to(device), lambda counts: counts.to(device))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert all(torch.equal(got[2][key], value) for key, value in want[2].items())
    assert bool(want[1].any())


@pytest.mark.parametrize("name", ["grpo", "sat-gspo"])
def test_a_steps_statistics_take_sums_that_lie_on_the_gpu(name: str) -> None:
    chosen = settings(name)
    reports = [loss_and_gradient(chosen, BATCH, LOG_PROBS, lambda counts: counts.clone())[2]]
    given: dict[str, Any] = {"version": 1, "max_lag": 2, "settings": chosen, "gate": None}
    want = step_statistics([BATCH], reports, sum_over=lambda counts: counts.clone(), **given)
    with pretend_gpu() as device:
        got = step_statistics([BATCH], reports, sum_over=lambda counts: counts.to(device), **given)
    assert got == want


@pytest.mark.parametrize("most_kept", [0, 1000])
def test_log_probs_and_their_gradients_are_computed_where_the_weights_lie(most_kept: int) -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(7, 5), torch.randn(11, 5), torch.randint(0, 11, (7,))

    def scored(device: torch.device | str) -> list[Tensor]:
        inputs = [value.clone().to(device).requires_grad_() for value in (hidden, weight)]
        scores = token_scores(inputs[0], inputs[1], labels.to(device), 0.6, chunk=3, most_kept=most_kept)
        scores.sum().backward()
        return [value.cpu() for value in (scores.detach(), *(v.grad for v in inputs if v.grad is not None))]

    want = scored("cpu")
    with pretend_gpu() as device:
        got = scored(device)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


def test_the_bounds_of_a_chunk_are_known_for_a_gpu() -> None:
    from trainer.megatron import scores

    assert scores.CHUNK_ELEMENTS["cuda"] * 4 == 64 << 20  # docs/trainer.md, "Numbers"


@pytest.mark.parametrize("mode", ["available", "off"])
def test_routes_are_replayed_and_recomputed_on_the_gpu(mode: str) -> None:
    batch = data.micro_batch((0, 3), with_routes=True, padding=1)
    assert batch.routes_valid is not None
    holes = batch.routes_valid.clone()
    holes[2] = False  # a row that keeps its own routing
    batch = replace(batch, routes_valid=holes)
    rows = batch.tokens + 1
    scores = torch.rand(rows // 2, data.EXPERTS, generator=torch.Generator().manual_seed(1))

    class Router:
        router_replay: LayerReplay

    def live(given: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
        found = given.topk(top_k)
        return found.values, found.indices

    def routed(device: torch.device | str) -> list[Any]:
        routers = [Router() for _ in range(data.LAYERS)]
        replay = RoutingReplay([(router, i) for i, router in enumerate(routers)], shard=1, shards=2, recompute=True)
        plan = plan_routes(
            batch,
            rows,
            experts=data.EXPERTS,
            top_k=data.TOP_K,
            moe_layers=(True,) * data.LAYERS,
            mode=mode,
            device=device,
        )
        assert plan.experts.device.type == plan.source.device.type == torch.device(device).type
        replay.forward(plan, training=True)
        chosen = [r.router_replay.get_replay_topk(scores.to(device), data.TOP_K, None, None, live) for r in routers]
        replay.forward_done()
        again = [r.router_replay.get_replay_topk(scores.to(device), data.TOP_K, None, None, live) for r in routers]
        assert all(torch.equal(a[1].cpu(), b[1].cpu()) for a, b in zip(chosen, again, strict=True))
        return [*(value.tolist() for pair in chosen for value in pair), replay.finish(training=True).tolist()]

    want = routed("cpu")
    with pretend_gpu() as device:
        assert routed(device) == want


def test_what_cuda_reads_at_its_start_is_set_unless_the_environment_says_it() -> None:
    empty: dict[str, str] = {}
    prepare_for_gpu(empty)
    assert empty == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    said = dict(own)
    prepare_for_gpu(said)
    assert said == own


@pytest.fixture
def gpu_config(make_config: ConfigFactory) -> RunConfig:
    return make_config(**{"trainer.device": "cuda", "trainer.dtype": "bfloat16"})


def test_a_rank_on_a_gpu_does_without_cudnns_attention(gpu_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        assert parallel._device(gpu_config) == torch.device("cuda", 3)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert taken == [torch.device("cuda", 3)]
