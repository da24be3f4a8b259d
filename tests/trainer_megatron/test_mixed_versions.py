"""A sample that was interrupted and continued under newer weights, recomputed with the weights of each version."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from configs.schema import TinyModel
from rollout.client import InvalidAnswer, Sample, Sampling
from rollout.continuation import join, next_request
from services.local.tiny_model import write_tiny_model
from tests.engine_fixture import RealEngine
from tests.trainer_megatron.settings import TEMPERATURE

pytestmark = [pytest.mark.engine, pytest.mark.megatron, pytest.mark.timeout(600)]
PROMPT = (6, 10, 4, 16)


def usable(answers: list[Sample | InvalidAnswer]) -> list[Sample]:
    assert all(isinstance(answer, Sample) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, Sample)]


async def interrupted(engine: RealEngine, other: Path) -> list[Sample]:
    """Two samples begun under version 20 and ended under version 21, whose weights are `other`'s."""
    engine.load(engine.folder, 20)
    whole = []
    async with engine.client() as client:
        first = asyncio.create_task(client.generate(PROMPT, 2, Sampling(TEMPERATURE, 480, ignore_end=True)))
        while not await client.running():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # some tokens
        await asyncio.to_thread(engine.post, "/pause_generation", {"mode": "abort"})
        partials = usable(await first)
        await asyncio.to_thread(engine.load, other, 21)
        await asyncio.to_thread(engine.post, "/continue_generation", {})
        for partial in partials:
            ask = next_request(PROMPT, partial, Sampling(TEMPERATURE, len(partial.token_ids) + 20, ignore_end=True))
            rest = usable(await client.generate(ask.prompt_ids, 1, ask.sampling, routes_start=ask.routes_start))
            whole.append(join(partial, rest[0], len(PROMPT)))
    return whole


async def test_each_versions_weights_give_the_engines_log_probs_and_routes_of_its_tokens(
    real_engine: RealEngine, ranks: Any, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    write_tiny_model(TinyModel(), 1, other)
    samples = await interrupted(real_engine, other)
    work: dict[int, list[list[Any]]] = {20: [], 21: []}
    expected: dict[str, np.ndarray] = {}
    for (number, sample), version in itertools.product(enumerate(samples), work):
        run = next(run for run in sample.versions if run.version == version)
        end = len(PROMPT) + run.start + run.length
        assert sample.routes is not None
        valid = torch.zeros(end, dtype=torch.bool)
        # The routes of the rows that predict this version's tokens; of the prompt too for the version that began. The
        # engine ran the rows before a continuation again under the newer weights: there they are the live router's.
        valid[0 if run.start == 0 else len(PROMPT) + run.start - 1 : end - 1] = True
        routes = torch.zeros(end, *sample.routes.shape[1:], dtype=torch.int32)
        routes[: end - 1] = torch.from_numpy(sample.routes[: end - 1].astype(np.int32))
        ids = torch.tensor([*PROMPT, *sample.token_ids[: run.start + run.length].tolist()])
        key, file = f"{number}-{version}", str(tmp_path / f"{number}-{version}.safetensors")
        save_file({"ids": ids, "routes": routes, "valid": valid}, file)
        work[version].append(["recompute", key, {"file": file}])
        expected[key] = sample.log_probs[run.start : run.start + run.length]
    models = {20: real_engine.folder, 21: other}
    found = ranks(({}, [each for v, do in work.items() for each in (["model", "", {"folder": str(models[v])}], *do)]))
    real_engine.load(real_engine.folder, 22)
    for key, log_probs in expected.items():
        assert len(log_probs) >= 1
        np.testing.assert_allclose(found[key]["log_probs"][-len(log_probs) :].numpy(), log_probs, atol=2e-5)
        assert float(found[key]["overlap"]) == 1.0  # the live router, with this version's weights, chose the same
    for number in range(len(samples)):  # and the other version's weights would not
        swapped = found[f"{number}-21"]["log_probs"][len(PROMPT) - 1 :][: len(expected[f"{number}-20"])].numpy()
        assert np.abs(swapped - expected[f"{number}-20"]).max() > 1e-2
