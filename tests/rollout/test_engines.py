"""Which engine a request goes to: the one with its prefix, unless that has far more to do than another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.queue import Broker
from broker.types import EngineRecord, EngineState
from rollout import engines
from rollout.client import EngineClient, Sampling
from rollout.counters import Counters
from rollout.engines import OVERLOADED, SPARE, EnginePool, choose
from rollout.environments.episode import Episode
from rollout.environments.turns import Turns
from rollout.sampling import Draw, draw_group
from tests.broker.helpers import Run
from tests.fakes.engine import FakeEngine
from tests.rollout.helpers import CHECKPOINT, serving

NAMES = ("a", "b", "c")
PROMPT = (3, 4, 5)


def record(name: str, version: int = 0, state: EngineState = EngineState.SERVING) -> EngineRecord:
    return EngineRecord(name, f"http://{name}", state, version)


def chosen(load: dict[str, float], **options: object) -> str | None:
    found = choose([record(name) for name in NAMES], load, **options)  # type: ignore[arg-type]
    return found.engine_id if found is not None else None


def test_without_a_prefix_the_least_busy_engine_is_chosen_and_of_two_the_newer() -> None:
    assert chosen({"a": 3, "b": 1, "c": 2}) == "b"
    newer = choose([record("a", 4), record("b", 5), record("c", 5)], {})
    assert newer is not None
    assert newer.engine_id == "b"


def test_a_prefix_is_worth_some_load_and_not_any() -> None:
    assert chosen({"a": SPARE}, prefer="a") == "a"
    assert chosen({"a": SPARE + 1}, prefer="a") == "b"
    busy: dict[str, float] = {"a": 120, "b": 70, "c": 90}
    assert chosen(busy, prefer="a") == "a", "all are busy, and it is less than twice as busy"
    assert chosen({**busy, "c": 59}, prefer="a") == "c"


def test_a_prefix_on_an_engine_that_does_not_fit_is_forgotten() -> None:
    records = [record("a", 1), record("b", 2), record("c", 2, EngineState.UPDATING)]
    for prefer in ("a", "c", "gone", None):
        found = choose(records, {"b": 1000.0}, at_least=2, prefer=prefer)
        assert found is not None
        assert found.engine_id == "b"
    assert choose(records, {}, at_least=3, prefer="a") is None


RECORDS = st.lists(
    st.builds(record, st.sampled_from(NAMES), st.integers(0, 3), st.sampled_from(EngineState)),
    unique_by=lambda r: r.engine_id,
)


@given(
    records=RECORDS,
    load=st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1e9)),
    at_least=st.integers(0, 3),
    prefer=st.none() | st.sampled_from([*NAMES, "gone"]),
)
def test_whatever_is_preferred_the_chosen_engine_fits_and_is_not_overloaded(
    records: list[EngineRecord], load: dict[str, float], at_least: int, prefer: str | None
) -> None:
    fit = [r for r in records if r.routable and r.version >= at_least]
    found = choose(records, load, at_least=at_least, prefer=prefer)
    assert (found in fit) if fit else found is None
    if found is not None:
        least = min(load.get(r.engine_id, 0.0) for r in fit)
        assert load.get(found.engine_id, 0.0) <= max(least + SPARE, OVERLOADED * least)


@pytest.fixture
def two(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    monkeypatch.setattr(engines, "SUSPECT_S", 0.01)
    Run(broker).start()
    broker.remove_engine("engine-1")
    with ExitStack() as stack:
        fakes = [FakeEngine(version="0", answer=lambda _p, _r: [7] * 20) for _ in range(2)]
        for i, fake in enumerate(fakes):
            serving(broker, stack.enter_context(fake.serve()), 0, f"engine-{i}")
        yield fakes


@pytest.fixture
async def pool(broker: Broker, two: list[FakeEngine]) -> AsyncIterator[EnginePool]:
    made = EnginePool(broker, lambda url: EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20), 10.0)
    made._asked = float("inf")  # no load is asked for: on a machine that is overloaded the answer may be late
    yield made
    await made.close()


def draw(tokens: int) -> Draw:
    return Draw(PROMPT, Sampling(1.0, tokens), 4, 0, Counters(), part_tokens=4)


async def test_a_sample_that_had_to_leave_stays_where_its_prefix_is_now(
    pool: EnginePool, two: list[FakeEngine], broker: Broker
) -> None:
    url = broker.engines()[0].url
    serving(broker, "http://127.0.0.1:9", 0, "engine-0")  # nothing listens there
    made = draw(20)

    def back(_prompt: list[int], _random: object) -> list[int]:
        serving(broker, url, 0, "engine-0")
        return [7] * 20

    two[1].answer = back
    await draw_group(made, 1, pool, "engine-0", 20.0)
    assert len(made.samples) == 1
    assert (len(two[0].calls("/generate")), len(two[1].calls("/generate"))) == (0, 5)
    assert made.engine_id == "engine-1"


async def test_the_turns_of_an_episode_go_to_the_engine_of_the_turn_before(
    pool: EnginePool, two: list[FakeEngine]
) -> None:
    turns = Turns(pool, "engine-0", draw(4), CHECKPOINT.context, 20.0)
    moved = Episode(PROMPT, engine_id="engine-1")
    for _ in range(3):
        moved = (await turns.next(moved, 4)).observed([9])
    stayed = await turns.next(Episode(PROMPT), 4)
    assert (moved.engine_id, stayed.engine_id) == ("engine-1", "engine-0")
    assert [len(call["input_ids"]) for call in two[1].calls("/generate")] == [3, 8, 13]
    assert len(two[0].calls("/generate")) == 1


async def test_connections_to_engines_that_are_gone_are_closed_once_nothing_runs_there(broker: Broker) -> None:
    Run(broker).start()
    broker.remove_engine("engine-1")
    opened: list[EngineClient] = []

    def connect(url: str) -> EngineClient:
        opened.append(EngineClient(url, CHECKPOINT, api_key=None, timeout_s=20))
        return opened[-1]

    pool = EnginePool(broker, connect, 10.0)

    async def look() -> None:
        pool._changed.set()
        await pool.pick()

    for number in range(3):
        serving(broker, f"http://127.0.0.1:{number + 1}", 0, f"engine-{number}")
    await look()
    first, second, third = broker.engines()
    for record in (first, second, third):
        pool.client(record)
    pool.started("engine-1", 4)
    for name in ("engine-0", "engine-1"):
        broker.remove_engine(name)
    await look()
    assert [client._http.is_closed for client in opened] == [True, False, False]
    pool.started("engine-1", -4)
    serving(broker, "http://127.0.0.1:9", 0, "engine-2")  # started again elsewhere
    await look()
    assert [client._http.is_closed for client in opened] == [True, True, True]
    assert pool.client(broker.engines()[0]).url == "http://127.0.0.1:9"
    await pool.close()
