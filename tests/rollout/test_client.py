"""The client believes nothing that an engine says until it adds up."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from broker.types import VersionRun
from rollout.client import (
    COPIED_PROMPT,
    EngineBusy,
    EngineClient,
    EngineDropped,
    EngineTimeout,
    EngineUnreachable,
    InvalidAnswer,
    KeyRefused,
    RequestRefused,
    Sample,
    Sampling,
    UnconfirmedVersion,
    decode_routes,
    parse_sample,
)
from rollout.probe import probe, recorded
from tests.fakes.engine import FakeEngine
from tests.fakes.model import fake_routes
from tests.rollout.helpers import CHECKPOINT

SAMPLING = Sampling(1.0, 4)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(version="7")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    transport = httpx.ASGITransport(engine.app)
    async with EngineClient("http://e", CHECKPOINT, api_key=None, timeout_s=5, transport=transport) as made:
        yield made


async def test_samples_come_back_complete(client: EngineClient) -> None:
    answers = await client.generate([3, 4, 5], 3, SAMPLING)
    assert len(answers) == 3
    for sample in answers:
        assert isinstance(sample, Sample)
        assert (sample.token_ids.dtype, sample.log_probs.dtype) == (np.dtype(np.int32), np.dtype(np.float32))
        assert sample.versions == (VersionRun(0, 4, 7),)
        assert sample.routes is not None
        assert sample.routes.dtype == np.uint8
        np.testing.assert_array_equal(sample.routes, fake_routes("7", 6, 2, 2, 8))


async def test_samples_share_the_prompt_pass_only_if_the_prompt_is_long() -> None:
    bodies: list[dict[str, Any]] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(503)

    transport = httpx.MockTransport(refuse)
    async with EngineClient("http://e", CHECKPOINT, api_key=None, timeout_s=5, transport=transport) as client:
        for prompt, n in (([5] * COPIED_PROMPT, 2), ([5] * (COPIED_PROMPT + 1), 2), ([5], 1)):
            with pytest.raises(EngineBusy):
                await client.generate(prompt, n, SAMPLING)
    assert [(len(body["input_ids"]), body["sampling_params"]["n"]) for body in bodies] == [
        (2, 1),
        (COPIED_PROMPT + 1, 2),
        (1, 1),
    ]


async def test_routes_come_from_the_position_asked_for(client: EngineClient) -> None:
    (sample,) = await client.generate([3, 4, 5], 1, SAMPLING, routes_start=2)
    assert isinstance(sample, Sample)
    np.testing.assert_array_equal(sample.routes, fake_routes("7", 6, 2, 2, 8)[2:])


async def test_a_dense_model_has_no_routes_and_asks_for_none(engine: FakeEngine) -> None:
    engine.experts = 0
    dense = replace(CHECKPOINT, experts=0, top_k=0)
    transport = httpx.ASGITransport(engine.app)
    async with EngineClient("http://e", dense, api_key=None, timeout_s=5, transport=transport) as client:
        (sample,) = await client.generate([3], 1, SAMPLING)
    assert isinstance(sample, Sample)
    assert sample.routes is None
    assert "return_routed_experts" not in engine.calls("/generate")[0]


def meta(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], Any]:
    def apply(answer: Any) -> Any:
        change(answer["meta_info"])
        return answer

    return apply


CONTRADICTIONS = {
    "no log-probs": meta(lambda m: m.pop("output_token_logprobs")),
    "a log-prob too few": meta(lambda m: m["output_token_logprobs"].pop()),
    "a log-prob of another token": meta(lambda m: m["output_token_logprobs"][0].__setitem__(1, 31)),
    "a log-prob that is null": meta(lambda m: m["output_token_logprobs"][0].__setitem__(0, None)),
    "no versions": meta(lambda m: m.pop("weight_versions")),
    "versions with a gap": meta(lambda m: m["weight_versions"][0].update(start=1)),
    "versions that end early": meta(lambda m: m["weight_versions"][0].update(end=3)),
    "versions that fall": meta(
        lambda m: m.update(
            weight_versions=[{"version": "7", "start": 0, "end": 2}, {"version": "6", "start": 2, "end": 4}]
        )
    ),
    "no routes": meta(lambda m: m.pop("routed_experts")),
    "routes a row short": meta(lambda m: m.update(routed_experts=m["routed_experts"][: -4 * 16 // 3])),
    "routes that are not base64": meta(lambda m: m.update(routed_experts="*")),
    "routes of an expert that is not": meta(
        lambda m: m.update(routed_experts=base64.b64encode(np.full((6, 2, 2), 8, "<i4").tobytes()).decode())
    ),
    "routes of another forward pass than the log-probs": meta(lambda m: m.update(num_retractions=1)),
    "an unknown end": meta(lambda m: m.update(finish_reason={"type": "tired"})),
    "no meta": lambda answer: {"output_ids": answer["output_ids"]},
    "a token outside the vocabulary": lambda answer: {**answer, "output_ids": [99, *answer["output_ids"][1:]]},
    "no token": lambda answer: {**answer, "output_ids": []},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
async def test_an_answer_that_contradicts_itself_is_invalid(
    engine: FakeEngine, client: EngineClient, name: str
) -> None:
    engine.fail("/generate", "mutate", change=CONTRADICTIONS[name])
    (answer,) = await client.generate([3, 4, 5], 1, SAMPLING)
    assert isinstance(answer, InvalidAnswer)
    assert str(answer)


@pytest.mark.parametrize("version", ["default", "unconfirmed", "-1", "1.0", "", "٣", "1e3"])
async def test_a_version_that_is_no_integer_is_an_error(engine: FakeEngine, client: EngineClient, version: str) -> None:
    engine.version = version
    (answer,) = await client.generate([3], 1, SAMPLING)
    assert isinstance(answer, UnconfirmedVersion)


async def test_one_bad_sample_does_not_spoil_the_others(engine: FakeEngine, client: EngineClient) -> None:
    def spoil(answers: Any) -> Any:
        answers[1]["meta_info"].pop("routed_experts")
        return answers

    engine.fail("/generate", "mutate", change=spoil)
    answers = await client.generate([3], 3, SAMPLING)
    assert [isinstance(answer, Sample) for answer in answers] == [True, False, True]


async def test_an_aborted_sample_without_tokens_is_a_sample(engine: FakeEngine, client: EngineClient) -> None:
    def empty(answer: Any) -> Any:
        info = {**answer["meta_info"], "output_token_logprobs": [], "weight_versions": []}
        info["finish_reason"] = {"type": "abort"}
        info.pop("routed_experts")
        return {"output_ids": [], "meta_info": info}

    engine.fail("/generate", "mutate", change=empty)
    (sample,) = await client.generate([3], 1, SAMPLING)
    assert isinstance(sample, Sample)
    assert (sample.finish, len(sample.token_ids)) == ("abort", 0)


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        ("status", {"code": 503}, EngineBusy),
        ("status", {"code": 429}, EngineBusy),
        ("status", {"code": 400}, RequestRefused),
        ("status", {"code": 401}, KeyRefused),
        ("garbage", {}, InvalidAnswer),
        ("drop", {}, EngineDropped),
        ("hang", {}, EngineTimeout),
    ],
)
async def test_failures_are_told_apart(
    engine: FakeEngine, kind: str, options: dict[str, Any], error: type[Exception]
) -> None:
    engine.fail("/generate", kind, **options)
    with engine.serve() as url:
        async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=2.0) as client:
            with pytest.raises(error):
                await client.generate([3], 1, SAMPLING)


async def test_an_engine_that_does_not_listen_is_unreachable(engine: FakeEngine) -> None:
    with engine.serve() as url:
        pass
    async with EngineClient(url, CHECKPOINT, api_key=None, timeout_s=1) as client:
        with pytest.raises(EngineUnreachable):
            await client.model_info()


@pytest.mark.parametrize(
    ("prompt", "sampling", "start"),
    [([], SAMPLING, 0), ([32], SAMPLING, 0), ([-1], SAMPLING, 0), ([3] * 510, SAMPLING, 0), ([3], SAMPLING, 1)],
)
async def test_a_request_that_would_harm_the_engine_is_not_sent(
    engine: FakeEngine, client: EngineClient, prompt: list[int], sampling: Sampling, start: int
) -> None:
    with pytest.raises(RequestRefused):
        await client.generate(prompt, 1, sampling, routes_start=start)
    assert engine.requests == []


async def test_the_key_is_sent_as_a_bearer_token(engine: FakeEngine) -> None:
    engine.api_key = "secret"
    transport = httpx.ASGITransport(engine.app)
    async with EngineClient("http://e", CHECKPOINT, api_key="secret", timeout_s=5, transport=transport) as client:
        assert (await client.model_info())["weight_version"] == "7"


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16), (1024, np.uint16)])
def test_routes_are_as_narrow_as_the_experts_allow(experts: int, dtype: type[np.generic]) -> None:
    wide = np.full((2, 1, 1), experts - 1, "<i4")
    shape = replace(CHECKPOINT, layers=1, top_k=1, experts=experts)
    routes = decode_routes(base64.b64encode(wide.tobytes()).decode(), shape, 2)
    assert routes.dtype == dtype
    assert routes.max() == experts - 1


async def test_the_probe_passes_before_any_version_is_confirmed_and_fails_without_routes(
    engine: FakeEngine, client: EngineClient
) -> None:
    engine.version = "unconfirmed"
    await probe(client)
    engine.experts = 0
    with pytest.raises(InvalidAnswer, match="enable-return-routed-experts"):
        await probe(client)


async def test_the_probe_fails_for_routes_that_no_kernel_wrote(engine: FakeEngine, client: EngineClient) -> None:
    zeros = base64.b64encode(np.zeros((6, 2, 2), "<i4").tobytes()).decode()

    def unwritten(answers: Any) -> Any:
        for answer in answers:
            answer["meta_info"]["routed_experts"] = zeros
        return answers

    engine.fail("/generate", "mutate", change=unwritten)
    with pytest.raises(InvalidAnswer, match="never written"):
        await probe(client)


def test_routes_are_recorded_if_some_layer_has_experts_that_differ() -> None:
    dense_first = np.zeros((3, 2, 2), np.uint8)
    dense_first[:, 1] = (4, 7)
    assert recorded(dense_first)
    assert recorded(np.zeros((3, 2, 1), np.uint8))  # of one expert a token nothing can be said
    assert not recorded(np.zeros((3, 2, 2), np.uint8))


def test_an_answer_of_another_kind_is_invalid() -> None:
    answers: list[object] = [None, [], "text", {"output_ids": [1]}]
    for answer in answers:
        with pytest.raises(InvalidAnswer):
            parse_sample(answer, CHECKPOINT, 1, 0)
