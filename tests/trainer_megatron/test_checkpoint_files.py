"""What lies on the disk when writes fail, trainers die and checkpoints are broken; without megatron."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import ConfigFactory
from trainer.main import Checkpoints
from trainer.megatron import checkpoint
from trainer.megatron.checkpoint import TrainingState, latest, stage_checkpoint, take_over
from trainer.megatron.optimizer_state import optimizer_part, restore_optimizer_part
from trainer.tensor_file import save_tensors


@pytest.fixture
def policy(make_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A policy of one rank whose tensors are one file."""
    tensors = SimpleNamespace(
        stage_tensors=lambda policy: "staged",
        write_tensors=lambda staged, folder, ranks: (folder / "tensors.distcp").write_text(staged),
    )
    monkeypatch.setitem(sys.modules, "trainer.megatron.checkpoint_io", tensors)
    monkeypatch.setattr(checkpoint, "gather_bytes", lambda payload, group: [payload])
    return SimpleNamespace(
        config=make_config(),
        parallel=SimpleNamespace(rank=0, world=1, is_main=True, writers=None),
        tensors=tensors,
    )


def save(policy: Any, root: Path, step: int, keep: int) -> None:
    stage_checkpoint(policy, root, TrainingState(step, step, (), 0, "hash"), keep=keep)()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_broken_checkpoint_of_a_later_step_does_not_push_out_the_one_just_written(
    policy: Any, tmp_path: Path, keep: int
) -> None:
    for step in (10, 20, 30):
        save(policy, tmp_path, step, keep=3)
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / "tensors.distcp").write_text("rotten")
    save(policy, tmp_path, 15, keep)
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000015"
    assert (tmp_path / "step-00000010").exists() is (keep == 2)


def test_a_disk_that_is_full_leaves_the_earlier_checkpoints_and_is_an_oserror(policy: Any, tmp_path: Path) -> None:
    save(policy, tmp_path, 1, keep=1)

    def no_room(staged: str, folder: Path, ranks: object) -> None:
        save_tensors({"x": torch.zeros(3)}, folder / "gone" / "rank-00000.safetensors")

    policy.tensors.write_tensors = no_room
    with pytest.raises(OSError, match=r"could not be written: .*rank-00000.safetensors"):
        save(policy, tmp_path, 2, keep=1)
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000001"


def test_one_rank_looks_for_the_checkpoint_that_all_resume_from(
    make_config: ConfigFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_here(root: Path) -> Path:
        raise AssertionError("this rank is not the main one")

    parallel = SimpleNamespace(is_main=False, broadcast_bytes=lambda payload: str(tmp_path / "step-00000007").encode())
    loaded: list[Path] = []

    def load(policy: object, folder: Path) -> TrainingState:
        loaded.append(folder)
        return TrainingState(7, 7, (), 0, "hash")

    monkeypatch.setattr(checkpoint, "latest", not_here)
    monkeypatch.setattr(checkpoint, "load_checkpoint", load)
    policy: Any = SimpleNamespace(parallel=parallel)
    state = Checkpoints(make_config(), policy).load_newest()
    assert state is not None
    assert (state.step, loaded) == (7, [tmp_path / "step-00000007"])


@pytest.mark.parametrize("moment", ["_make_empty", "write_tensors", "_seal", "_finish", "owner_of"])
def test_a_trainer_that_was_taken_over_finishes_no_checkpoint_wherever_it_slept(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save(policy, tmp_path, 20, keep=3)
    owner = policy.tensors if moment == "write_tensors" else checkpoint
    awake = getattr(owner, moment)

    def slept(*arguments: Any) -> Any:
        found = awake(*arguments) if moment == "owner_of" else None  # it is asked, and then comes the successor
        take_over(tmp_path, 2, 20)
        return found if moment == "owner_of" else awake(*arguments)

    monkeypatch.setattr(owner, moment, slept)
    with pytest.raises(OSError, match=r"taken over|No such file"):
        stage_checkpoint(policy, tmp_path, TrainingState(40, 40, (), 0, "hash", epoch=1), keep=3)()
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch", "step-00000020"]


def test_a_checkpoint_finished_while_the_successor_started_is_set_aside(policy: Any, tmp_path: Path) -> None:
    for step in (20, 40):
        save(policy, tmp_path, step, keep=3)
    (kept,) = take_over(tmp_path, 2, 20)
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000020"
    assert (kept / "manifest.json").is_file()


def test_of_checkpoints_that_were_set_aside_the_newest_stays_once_a_later_one_is_durable(
    policy: Any, tmp_path: Path
) -> None:
    for epoch, steps in ((9, (20, 30, 40)), (10, (30, 50))):  # by their names epoch 10 would come before epoch 9
        for step in steps:
            stage_checkpoint(policy, tmp_path, TrainingState(step, step, (), 0, "hash", epoch=epoch - 1), keep=9)()
        take_over(tmp_path, epoch, 20)
    assert len(list(tmp_path.glob("superseded-*-by-10"))) == 2  # none goes before there is a later one
    stage_checkpoint(policy, tmp_path, TrainingState(60, 60, (), 0, "hash", epoch=10), keep=9)()
    assert [path.name for path in tmp_path.glob("superseded-*")] == ["superseded-step-00000050-by-10"]


@pytest.mark.parametrize("name", ["step-00000040.bak", "step-0000040", "step-00000040-copy", "step-000000040"])
def test_a_copy_under_another_name_is_no_checkpoint(policy: Any, tmp_path: Path, name: str) -> None:
    save(policy, tmp_path, 40, keep=2)
    (tmp_path / "step-00000040").rename(tmp_path / name)
    assert latest(tmp_path) is None
    assert take_over(tmp_path, 2, 0) == []
    for step in (41, 42, 43):
        stage_checkpoint(policy, tmp_path, TrainingState(step, step, (), 0, "hash", epoch=2), keep=2)()
    assert (tmp_path / name / "manifest.json").is_file()
    assert sorted(path.name for path in tmp_path.glob("step-0000004[1-3]")) == ["step-00000042", "step-00000043"]


def test_steps_beyond_eight_digits_are_in_order(policy: Any, tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save(policy, tmp_path, step, keep=1)
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-100000000"


def test_a_successor_writes_beside_one_of_the_same_step(policy: Any, tmp_path: Path) -> None:
    take_over(tmp_path, 1, 0)
    stale = checkpoint.stage_checkpoint(policy, tmp_path, TrainingState(40, 40, (), 0, "hash", epoch=1), keep=3)
    take_over(tmp_path, 2, 0)
    stage_checkpoint(policy, tmp_path, TrainingState(40, 41, (), 0, "hash", epoch=2), keep=3)()
    with pytest.raises(OSError, match="epoch 2 has taken over from that of epoch 1"):
        stale()
    found = latest(tmp_path)
    assert found is not None
    assert checkpoint.read_state(found).version == 41


@pytest.mark.parametrize("held", [b"", b"what is this", b"\xff\xfe", b"9" * 5000])
def test_a_file_that_names_no_owner_is_one_error_and_the_next_start_writes_it_anew(
    policy: Any, tmp_path: Path, held: bytes
) -> None:
    save(policy, tmp_path, 20, keep=3)
    (tmp_path / "epoch").write_bytes(held)
    with pytest.raises(OSError, match=r"could not be written: .*epoch does not name the trainer"):
        save(policy, tmp_path, 40, keep=3)
    take_over(tmp_path, 2, 20)
    stage_checkpoint(policy, tmp_path, TrainingState(40, 40, (), 0, "hash", epoch=2), keep=3)()
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-00000040"


def test_a_disk_that_an_unfinished_checkpoint_filled_lets_the_next_trainer_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = tmp_path / ".step-00000040.1.partial"

    def on_a_small_disk(path: Path, data: bytes) -> None:
        if unfinished.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr(checkpoint, "write_durably", on_a_small_disk)
    unfinished.mkdir()
    take_over(tmp_path, 2, 20)
    assert checkpoint.owner_of(tmp_path) == 2


def test_a_disk_that_is_full_when_a_trainer_starts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_durably", full)
    with pytest.raises(OSError, match=r"^checkpoints cannot be written to .*: .*No space left"):
        take_over(tmp_path, 2, 20)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.distributed.DistBackendError])
def test_a_gpu_that_fails_while_a_checkpoint_is_read_does_not_condemn_it(
    policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError]
) -> None:
    save(policy, tmp_path, 20, keep=1)

    def fails(*_: object, **__: object) -> None:
        raise error("not the checkpoint's fault")

    policy.tensors.load_tensors = fails
    with pytest.raises(error):  # a ConfigError would end the run for good
        checkpoint.load_checkpoint(policy, tmp_path / "step-00000020")


class Fused(torch.optim.Optimizer):
    """Counts its steps by group, as the optimizers of Transformer Engine and apex do."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))], {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["step"] = group.get("step", 0) + 1
        for parameter in group["params"]:
            self.state[parameter]["exp_avg"] = torch.full_like(parameter, float(group["step"]))


def test_an_optimizer_that_counts_its_steps_by_group_goes_on_counting_after_a_resume() -> None:
    before, after = Fused(), Fused()
    for _ in range(5):
        before.step()
    own = {name: value.detach().clone() for name, value in optimizer_part([before]).items()}
    restore_optimizer_part([after], own)
    assert after.param_groups[0]["step"] == 5
    after.step()
    assert [float(after.state[p]["exp_avg"][0]) for p in after.param_groups[0]["params"]] == [6.0, 6.0]


def test_an_optimizer_that_counts_its_steps_by_parameter_goes_on_bit_for_bit() -> None:
    start = torch.arange(3.0)
    before, after = (torch.optim.AdamW([torch.nn.Parameter(start.clone())], lr=0.1) for _ in range(2))

    def step(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.ones(3)
        optimizer.step()
        return parameter.detach().clone()

    for _ in range(3):
        step(before)
    restore_optimizer_part([after], {k: v.detach().clone() for k, v in optimizer_part([before]).items()})
    assert torch.equal(step(after), step(before))
