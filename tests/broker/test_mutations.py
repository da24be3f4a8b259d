"""Each guarantee's test fails without the line that keeps it: schedules run on scripts with that line spoilt."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase
from hypothesis.stateful import run_state_machine_as_test

from broker import scripts
from broker.errors import BrokerError
from broker.server import EmbeddedServer
from tests.broker.schedules import on, schedules

# what is lost -> (script, text, what stands there instead)
MUTATIONS = {
    # (That `flying >= (max_lag + 1) * B` refuses follows from the deadline, as no engine is ahead of the trainer.)
    "admission behind the deadline": ("admit", "if latest - e > max_lag then", "if latest - e > max_lag + 1 then"),
    "admission past the end": ("admit", "if flying >= left * B then", "if flying > left * B then"),
    "prompts to issue again come first": ("admit", "if again > 0 then", "if false then"),
    "stale at submission": ("submit", "local stale = v - oldest > n('max_lag')", "local stale = false"),
    "only the holder submits": (
        "submit",
        "if rec.state ~= 'generating' or rec.worker ~= worker then",
        "if not rec.state then",
    ),
    "a submission is not replaced": (
        "submit",
        "if rec.state and rec.worker == worker and rec.sum == sum then",
        "if rec.state and rec.worker == worker and rec.sum then",
    ),
    "stale at the pull": ("pull", "version - max_lag - 1)", "version - max_lag - 2)"),
    "stragglers, off by one": ("pull", "if late > (D - version) * B and", "if late > (D - version) * B + 1 and"),
    "stragglers, room of this batch": (
        "pull",
        "'-inf', D - max_lag) < groups then",
        "'-inf', D - max_lag) <= groups then",
    ),
    "stragglers are those still generating": ("common", "add('admitted_hist', rec.version, -1)", ""),
    "stragglers are not waited for for ever": (
        "pull",
        "if now - n('straggler_since') < n('straggler_ms') then",
        "if true then",
    ),
    "earliest deadline first": (
        "pull",
        "redis.call('ZRANGE', k('ready'), 0, groups - 1)",
        "redis.call('ZRANGE', k('ready'), -groups, -1)",
    ),
    "what was noted is written before it is read again": ("common", "if #ids > 0 then flush() end", ""),
    "the second of two transitions sees what the first did": ("both", "write()\n", ""),
    "and the settings that the first changed": (
        "common",
        "do policy[name], settings[name] = value, value end",
        "do settings[name] = value end",
    ),
    "what comes next is said": ("pull", "k('ready'), groups, groups + ahead - 1", "k('ready'), 0, ahead - 1"),
    "leases expire": ("common", "local function reap()\n", "local function reap()\n  if true then return end\n"),
    "leases expire although the clock was set back": ("common", "index('generating', id, latest)", ""),
    "waiting for stragglers ends although the clock was set back": (
        "pull",
        "or n('straggler_since') > now then",
        "then",
    ),
    "tries are bounded": ("common", "rec.attempt < n('group_tries')", "true"),
    "a step is recorded once": ("step", "if policy.stepped == ARGV[2] and", "if false and"),
    "prompts close with their step": ("step", "  index('open', rec.prompt)\n", ""),
    "retention of the prompt alone": ("step", "if policy.retention == 'prompt' then", "if false then"),
    "a rollback undoes later steps": ("attach", "k('trained'), '-inf', step)", "k('trained'), '-inf', step + 1)"),
    "consumed ids are durable": ("attach", "if rec.state then make_durable", "if false then make_durable"),
    "a rollback does not outlive the bound": ("attach", "> n('max_lag') then", "> n('max_lag') + 9 then"),
    "a rollback issues freed prompts again": ("attach", "'rolled back, payload not retained', 'again')", "'', 'dead')"),
    "an empty Redis takes the cursor": ("attach", "if next_index >= 0 then", "if false then"),
    "versions are never named twice": ("name_version", "math.max(highest, cjson.decode(raw).version)", "highest"),
    "a commit stops at its step": ("commit", "k('trained'), '-inf', step)", "k('trained'), '-inf', step + 1)"),
    "payloads go with the commit": (
        "common",
        "  free_payload(id, rec)\n  put(id, false)\nend\nlocal function reap",
        "  put(id, false)\nend\nlocal function reap",
    ),
    "a requeued prompt is issued": ("requeue", "reissue(ARGV[1], 0)\n", ""),
    "fencing": ("fence", "if ARGV[1] ~= policy.epoch then", "if false then"),
}


@pytest.fixture
def spoilt(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The transitions with one line changed."""
    name, text, instead = MUTATIONS[request.param]
    folder = tmp_path / "lua"
    shutil.copytree(scripts.FOLDER, folder)
    whole = (folder / f"{name}.lua").read_text(encoding="utf-8")
    assert text in whole, f"{name}.lua has no {text!r} any more: change the mutation with it"
    (folder / f"{name}.lua").write_text(whole.replace(text, instead), encoding="utf-8")
    monkeypatch.setattr(scripts, "FOLDER", folder)
    forget()
    yield
    forget()


def forget() -> None:
    """Scripts are read again."""
    scripts.script.cache_clear()
    scripts.digest.cache_clear()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spoilt", MUTATIONS, indirect=True)
@pytest.mark.usefixtures("spoilt")
def test_the_schedules_notice_a_guarantee_that_is_gone(redis_server: EmbeddedServer, tmp_path: Path) -> None:
    with (
        on(redis_server, tmp_path) as machine,
        pytest.raises((AssertionError, BrokerError, KeyError, pytest.fail.Exception)),
    ):
        run_state_machine_as_test(machine, settings=schedules(1000, Phase.generate))


def test_each_mutation_changes_a_line_that_is_there() -> None:
    for what, (name, text, _) in MUTATIONS.items():
        assert text in (scripts.FOLDER / f"{name}.lua").read_text(encoding="utf-8"), what
