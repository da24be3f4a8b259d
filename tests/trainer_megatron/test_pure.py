"""The parts that need no megatron: routes, chunked scores, model shapes, files, launching."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from configs.load import ConfigError
from configs.schema import LayoutSection
from tests.trainer_megatron import data
from tests.trainer_megatron.settings import run_config
from trainer.megatron import compat, parallel
from trainer.megatron.model_config import check_layout, model_shape
from trainer.megatron.replay import InvalidRoutes, LayerReplay, RoutePlan, RoutingReplay, Source, plan_routes
from trainer.megatron.safetensors_file import SafetensorsWriter, TensorEntry
from trainer.megatron.scores import token_scores

plan_of = functools.partial(plan_routes, experts=data.EXPERTS, top_k=data.TOP_K, moe_layers=(True, True))
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def test_rows_without_a_trace_are_spread_where_nothing_depends_on_them() -> None:
    batch = data.micro_batch((0, 3), with_routes=True, padding=2)
    plan = plan_of(batch, batch.tokens + 3, mode="required")
    sources = [Source(value) for value in plan.source.tolist()]
    ends = {data.LENGTHS[0] - 1, data.LENGTHS[0] + data.LENGTHS[3] - 1}
    for row, source in enumerate(sources):
        spread = row in ends or row >= data.LENGTHS[0] + data.LENGTHS[3]
        assert source is (Source.SPREAD if spread else Source.TRACE)
    assert batch.routes is not None
    assert torch.equal(plan.experts[0], batch.routes[0].long())
    padding = plan.experts[-5:].flatten()
    assert len(padding.unique()) == data.EXPERTS
    assert all(len(set(row)) == data.TOP_K for layer in plan.experts.tolist() for row in layer)


def test_a_missing_trace_is_an_error_only_where_replay_is_required() -> None:
    batch = data.micro_batch((0, 1), with_routes=True)
    assert batch.routes_valid is not None
    holes = batch.routes_valid.clone()
    holes[2] = False
    partial = dataclasses.replace(batch, routes_valid=holes)
    with pytest.raises(InvalidRoutes, match="row 2"):
        plan_of(partial, batch.tokens, mode="required")
    plan = plan_of(partial, batch.tokens, mode="available")
    assert Source(int(plan.source[2])) is Source.OWN
    plain = data.micro_batch((0, 1), with_routes=False)
    with pytest.raises(InvalidRoutes, match="required"):
        plan_of(plain, plain.tokens, mode="required")
    assert set(plan_of(plain, plain.tokens, mode="off").source.tolist()) == {Source.OWN.value}


@pytest.mark.parametrize(("layers", "top_k"), [(3, 2), (2, 3)])
def test_a_trace_of_another_model_is_refused(layers: int, top_k: int) -> None:
    batch = data.micro_batch((0, 1), with_routes=True)
    other = dataclasses.replace(batch, routes=torch.zeros(batch.tokens, layers, top_k, dtype=torch.uint8))
    with pytest.raises(InvalidRoutes):
        plan_of(other, batch.tokens, mode="required")


def test_a_recomputed_layer_gets_the_experts_of_its_own_micro_batch_in_one_forward_one_backward_order() -> None:
    class Router:
        router_replay: LayerReplay

    router = Router()
    replay = RoutingReplay([(router, 0)], shard=0, shards=1, recompute=True)

    def live(scores: torch.Tensor, top_k: int, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        found = scores.topk(top_k)
        return found.values, found.indices

    def route() -> torch.Tensor:
        return router.router_replay.get_replay_topk(torch.rand(3, 8), 2, None, None, live)[1]

    def plan(first: int, source: Source) -> RoutePlan:
        return RoutePlan(torch.tensor([[[first, first + 1]]] * 3), torch.full((3,), source.value))

    forward = []
    for first, source in ((0, Source.TRACE), (4, Source.OWN)):
        replay.forward(plan(first, source), training=True)
        forward.append(route())
        replay.forward_done()
    assert forward[0].tolist() == [[0, 1]] * 3
    assert torch.equal(route(), forward[0])
    replay.forward(plan(6, Source.TRACE), training=True)
    forward.append(route())
    replay.forward_done()
    assert torch.equal(route(), forward[1])
    assert torch.equal(route(), forward[2])
    replay.finish(training=True)
    replay.forward(plan(0, Source.TRACE), training=True)
    route()
    with pytest.raises(RuntimeError, match="not replayed"):
        replay.finish(training=True)


@pytest.mark.parametrize("most_kept", [0, 100])
@pytest.mark.parametrize("entropy", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_scores_and_their_gradients_equal_those_of_whole_logits(
    chunk: int, entropy: float, most_kept: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)
    labels = torch.randint(0, 11, (7,))
    pull = torch.randn(2, 7) * torch.tensor([[1.0], [entropy]])

    log_p = (hidden @ weight.t() / 0.6).log_softmax(-1)
    want = torch.stack((log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)))
    want_gradients = torch.autograd.grad((want * pull).sum(), (hidden, weight))
    got = token_scores(hidden, weight, labels, 0.6, chunk=chunk, most_kept=most_kept)
    got_gradients = torch.autograd.grad((got * pull).sum(), (hidden, weight))

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_both_spellings_of_the_expert_count_are_read() -> None:
    other = {("num_local_experts" if k == "num_experts" else k): v for k, v in QWEN3_MOE.items()}
    assert model_shape(other) == model_shape(QWEN3_MOE)
    assert model_shape(QWEN3_MOE | {"mlp_only_layers": [1], "intermediate_size": 96}).moe_layers == (
        True,
        False,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"vocab_size": None}, "vocab_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope scaling"),
        ({"num_experts": None}, "num_experts or num_local_experts"),
    ],
)
def test_what_is_not_understood_is_named(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        model_shape(QWEN3_MOE | change)


@pytest.mark.parametrize("part", ["pipeline", "tensor", "expert"])
def test_a_layout_that_does_not_divide_the_model_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=f"trainer.layout.{part} = 3"):
        check_layout(model_shape(QWEN3_MOE), LayoutSection(**{part: 3}))


def test_a_file_written_tensor_by_tensor_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(5, np.float32)}
    entries = [TensorEntry(name, "F32", array.shape, array.nbytes) for name, array in arrays.items()]
    writer = SafetensorsWriter(tmp_path / "x.safetensors", entries)
    with pytest.raises(ValueError, match="announced"):
        writer.write("a", arrays["a"].data)
    for name, array in arrays.items():
        writer.write(name, array.data)
    summary = writer.close()
    assert summary["bytes"] == (tmp_path / "x.safetensors").stat().st_size
    for name, array in load_file(tmp_path / "x.safetensors").items():
        assert np.array_equal(array, arrays[name])


LAUNCHER = """
import sys
from tests.trainer_megatron.settings import run_config
from trainer.launch import run_ranks
sys.exit(run_ranks(run_config({"trainer.layout.data": 2}), "tests.trainer_megatron.probe", sys.argv[1:]))
"""


def _launch(*arguments: str) -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *arguments], cwd=root, env=os.environ | {"PYTHONPATH": "."}
    )


def _pids(folder: Path) -> list[int]:
    """Process ids of the two ranks, once both have started."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        found = [int(path.read_text()) for path in folder.glob("rank-*") if path.read_text()]
        if len(found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def _wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still there"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def test_when_one_rank_fails_the_others_are_ended_and_its_exit_code_is_returned(tmp_path: Path) -> None:
    launcher = _launch(str(tmp_path), "fail")
    assert launcher.wait(110) == 7
    _wait_until_gone(_pids(tmp_path), 1)


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = _launch(str(tmp_path), "wait")
    pids = _pids(tmp_path)
    launcher.kill()
    launcher.wait(10)
    _wait_until_gone(pids, 10)


def test_a_termination_signal_reaches_every_rank(tmp_path: Path) -> None:
    launcher = _launch(str(tmp_path), "wait")
    pids = _pids(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 128 + signal.SIGTERM
    _wait_until_gone(pids, 1)


@pytest.mark.parametrize(
    ("device", "left"), [("cuda", ["groups"]), ("cpu", ["groups", "model parallel", "process groups"])]
)
def test_after_an_error_a_rank_on_a_gpu_does_not_wait_for_the_others_to_take_their_groups_down(
    monkeypatch: pytest.MonkeyPatch, device: str, left: list[str]
) -> None:
    done: list[str] = []
    state = SimpleNamespace(
        initialize_model_parallel=lambda **_: done.append("groups"),
        get_data_parallel_rank=lambda: 0,
        get_data_parallel_world_size=lambda: 1,
        get_data_parallel_group=lambda: None,
        destroy_model_parallel=lambda: done.append("model parallel"),
    )
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", SimpleNamespace())
    seeds = SimpleNamespace(model_parallel_cuda_manual_seed=lambda seed: None)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", seeds)
    monkeypatch.setattr(parallel, "_device", lambda config: torch.device(device))
    monkeypatch.setattr(compat, "install", lambda: None)
    for name, value in (
        ("init_process_group", lambda *_, **__: None),
        ("new_group", lambda **_: None),
        ("destroy_process_group", lambda: done.append("process groups")),
    ):
        monkeypatch.setattr(torch.distributed, name, value)
    with pytest.raises(ZeroDivisionError), parallel.parallel(run_config({})):
        raise ZeroDivisionError
    assert done == left
    done.clear()
    with parallel.parallel(run_config({})):
        pass
    assert done == ["groups", "model parallel", "process groups"]


def test_scores_never_hold_the_logits_of_more_than_one_chunk_of_rows() -> None:
    rows, vocabulary, chunk = 50, 97, 8
    widest: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 2 and result.shape[1] == vocabulary:
                widest.append(result.shape[0])
            return result

    hidden = torch.randn(rows, 5, requires_grad=True)
    weight = torch.randn(vocabulary, 5, requires_grad=True)
    with Watch():  # type: ignore[no-untyped-call]  # its base class has no types
        scores = token_scores(hidden, weight, torch.arange(rows), 1.0, chunk=chunk, most_kept=rows * vocabulary - 1)
        forward = len(widest)
        scores.sum().backward()
    assert 0 < forward < len(widest)  # both passes were watched
    assert max(widest) == chunk
