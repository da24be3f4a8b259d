"""What is wrong with a file, a value of --set or a checkpoint's config.json is one ConfigError, never a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError, RunConfig, load_config, save_config
from configs.check import sizes_of
from configs.fields import USUAL_NAMES, fields
from configs.load import parse_yaml, validated
from configs.schema import ServiceSection
from configs.sections.section import ALLOWED

LOCAL = Path(__file__).parents[2] / "configs" / "local.yaml"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"run: {name: caf\xe9}", "not text in UTF-8"),
        ("run: {name: local}".encode("utf-16"), "not text in UTF-8"),
        (b"[" * 5000, "nested too deeply"),
        (b"day: 2024-13-45", "not valid YAML: month must be in"),
        (b"run: {steps: " + b"9" * 5000 + b"}", "not valid YAML"),
        (b"run: {name: [", "not valid YAML"),
        (b"lag: {max: 1}\nlag: {max: 900}", "'lag' is there twice"),
        (b"lag: {max: 1, max: 900}", "'max' is there twice"),
        (b"# a run\nlag: {max: 1}\n\nlag: {max: 900}", "line 4, column 1: the key 'lag' is there twice"),
        (b'run: {directory: "a\\0b"}', "holds a NUL"),
        (b"- 1", "expected sections .*, found a list"),
        (b"# all of it is a comment", "it is empty"),
        (b"lag:\n\tmax: 1", "not valid YAML: line 2, column 1: .*Indent with spaces"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_message(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file))


def test_a_key_that_an_anchor_brought_may_be_overridden() -> None:
    assert parse_yaml("{a: &base {max: 1, min: 0}, b: {<<: *base, max: 2}}")["b"] == {"max": 2, "min": 0}


def test_all_problems_of_the_schema_come_together_each_with_the_file_and_the_field(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {steps: 0, name: a b}\nlag: [1]\nengine: {urls: [http://e:1, e:1]}\nredis: {url: http://h}")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    lines = str(caught.value).splitlines()
    for name in ("run.steps", "run.name", "lag", "model", "engine.urls.1", "redis.url"):
        assert [line for line in lines if line.startswith(f"{file}: {name}: ")], name


def test_all_contradictions_come_together_each_with_the_file_and_the_field() -> None:
    wrong: dict[str, Any] = {
        "lag.max": 0,
        "weights.publish_interval": 4,
        "rollout.samples_per_prompt": 1,
        "model.tiny.heads": 3,
        "model.tiny.experts_per_token": 9,
        "model.path": "m",
        "redis.payloads": "folder",
        "redis.ca_file": "ca.pem",
        "weight_sync.key_file": "key.pem",
        "monitor.cert_file": "certificate.pem",
    }
    with pytest.raises(ConfigError) as caught:
        load_config(LOCAL, wrong)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{LOCAL}: ") for line in lines)
    for name in wrong:
        assert any(name in line for line in lines), name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lag.maxx", "lag.max"),
        ("trainr", "trainer"),
        ("model.tiny.layer", "model.tiny.layers"),
        ("trainer.learning_rate", "trainer.optimizer.learning_rate"),
        ("lag.min", "lag.adaptive.min"),
        ("trainer.optimizer.lr", "trainer.optimizer.learning_rate"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("rollout.max_tokens", "rollout.max_new_tokens"),
        ("trainer.max_off_policy", "lag.max"),
    ],
)
def test_an_unknown_key_says_which_one_was_probably_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: unknown key\. Did you mean {meant}\?"):
        load_config(LOCAL, {name: 1})


def test_what_other_programs_call_a_field_is_no_field_itself_and_names_one_that_is_there() -> None:
    names = {field.name for field in fields()}
    assert set(USUAL_NAMES.values()) <= names
    assert not set(USUAL_NAMES) & {name.rpartition(".")[2] for name in names}


def test_a_key_like_no_other_is_referred_to_the_schema() -> None:
    for name in ("lag.qqq", "qqq"):
        with pytest.raises(ConfigError, match=rf"{name}: unknown key\. Remove it"):
            load_config(LOCAL, {name: 1})
    with pytest.raises(ConfigError, match=r"evaluation\.tasks\.0\.nme: unknown key\. .*tasks\.0\.name\?"):
        load_config(LOCAL, {"evaluation.tasks": [{"nme": "copy"}]})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("run.id", "a b", "'a b' is not allowed here. It may be: text of at most 80 letters"),
        ("run.id", 7, "7 without quotes is not allowed here. It may be: text"),
        ("run.name", "x" * 49, "It may be: text of at most 48 letters"),
        ("lag.max", -1, "-1 is not allowed here. It may be: whole number, at least 0, at most 1024."),
        ("run.steps", 1.5, "1.5 is not allowed here. It may be: whole number, at least 1."),
        ("run.steps", None, "an empty value is not allowed here. It may be: whole number, at least 1."),
        ("lag", [1], "a list is not allowed here. It may be: section with at least max."),
        ("traces", 1, "1 is not allowed here. It may be: section with endpoint, ratio, timeout_s,"),
        ("engine.dtype", "fp16", "'fp16' is not allowed here. It may be: float32, bfloat16."),
        ("engine.urls", ["h:1"], "'h:1' is not allowed here. It may be: address such as http://host:30000."),
        ("trainer.loss.parameters", {"cap": "x"}, "'x' is not allowed here. It may be: number."),
        ("traces.endpoint", "collector:4318", "It may be: address such as http://collector:4318"),
    ],
)
def test_a_value_that_is_refused_is_told_what_it_may_be_in_words(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(LOCAL, {name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("trainer.loss", "sat-grpo", "trainer.loss: a section belongs here. Write loss: {name: sat-grpo}."),
        ("task", "max-digit", "task: a section belongs here. Write task: {name: max-digit}."),
        ("model", "models/Qwen3", "model: a section belongs here. Write model: {path: models/Qwen3}."),
        ("model", "tiny", "model: 'tiny' is not allowed here. It may be: section with path, tiny."),
        ("lag", 4, "lag: 4 is not allowed here. It may be: section with at least max."),
        ("redis", "redis://:hush@host", "redis: this text is not allowed here"),
    ],
)
def test_a_bare_name_where_a_section_belongs_is_shown_as_the_section_that_was_meant(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(LOCAL, {name: value})
    assert f"{LOCAL}: {said}" in str(caught.value)


def test_a_size_that_nobody_set_is_not_named_but_the_field_that_it_comes_from() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(LOCAL, {"trainer.layout": {"tensor": 3}})
    assert "model.tiny.expert_hidden = 64 is not divisible by trainer.layout.tensor = 3" in str(caught.value)
    with pytest.raises(ConfigError, match=r"expert x tensor = 4 must divide data x tensor = 2"):
        load_config(LOCAL, {"trainer.layout": {"tensor": 2, "expert": 2}})
    with pytest.raises(ConfigError, match=r"expert x expert_tensor = 2 must divide data x tensor = 1"):
        load_config(LOCAL, {"trainer.layout": {"expert_tensor": 2}})


def test_a_password_in_an_address_that_is_refused_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"traces\.endpoint") as caught:
        load_config(LOCAL, {"traces.endpoint": "http://me:hush@collector:4318"})
    assert "hush" not in str(caught.value)


def test_every_pattern_is_told_in_words() -> None:
    def parts(node: object) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            yield node
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from parts(inner)

    with_pattern = [part for part in parts(RunConfig.model_json_schema()) if isinstance(part.get("pattern"), str)]
    assert len(with_pattern) >= 4
    assert all(part.get(ALLOWED) for part in with_pattern)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run.id", ".."),
        ("run.id", "."),
        ("run.id", "-x"),
        ("run.name", "../x"),
        ("run.steps", 10**26),
        ("rollout.workers", 10**9),
        ("engine.replicas", 10**9),
        ("redis.timeout_s", float("inf")),
        ("lag.straggler_wait_s", float("inf")),
        ("trainer.optimizer.learning_rate", float("inf")),
        ("trainer.loss.parameters", {"x": float("nan")}),
        ("redis.url", "localhost:6379"),
        ("redis.url", "http://localhost:6379"),
        ("redis.url", ""),
        ("engine.urls", ["localhost:30000"]),
        ("task.shaping.format_pattern", "("),
        ("task.shaping.overlong_buffer", 2),
        ("model.tiny.head_dim", 31),
        ("model.tiny.heads", 3),
        ("model.tiny.experts_per_token", 9),
        ("rollout.min_samples", 17),
        ("trainer.groups_per_step", 0),
        ("trainer.steps_per_batch", 257),
        ("engine.max_total_tokens", 1),
        ("redis.timeout_s", 1e300),
        ("lag.adaptive", {"min": 5, "max": 2}),
        ("task.curriculum", {"low": 0.9, "high": 0.1}),
        ("trainer.optimizer.min_learning_rate", 1.0),
        ("evaluation.best", "max-digit/avg@8"),
        ("lag.max", True),
        ("trainer.optimizer.learning_rate", True),
        ("trainer.loss.clip_low", True),
        ("rollout.workers", False),
        ("engine.max_total_tokens", True),
        ("trainer.loss.parameters", {"x": True}),
    ],
)
def test_a_value_that_no_run_could_use_is_refused_by_the_name_of_its_field(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_config(LOCAL, {name: value})


def test_a_field_of_a_section_that_a_file_leaves_empty_may_be_set(tmp_path: Path) -> None:
    save_config(load_config(LOCAL), tmp_path / "resolved.yaml")
    assert "adaptive: null" in (tmp_path / "resolved.yaml").read_text()
    adaptive = load_config(tmp_path / "resolved.yaml", {"lag.adaptive.max": 5}).lag.adaptive
    assert adaptive is not None
    assert adaptive.max == 5
    with pytest.raises(ConfigError, match=r"lag\.max\.x\.y: lag\.max holds 1, not fields"):
        load_config(LOCAL, {"lag.max.x.y": 5})


def test_a_group_of_one_is_refused_as_it_has_no_advantage() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.samples_per_prompt is 1.*nothing would be trained"):
        load_config(LOCAL, {"rollout.samples_per_prompt": 1, "rollout.min_samples": 1})


def test_every_data_rank_gets_a_group_and_groups_need_not_be_a_multiple_of_the_ranks() -> None:
    assert load_config(LOCAL, {"trainer.layout.data": 3, "trainer.groups_per_step": 16}).trainer.layout.data == 3
    with pytest.raises(ConfigError, match=r"trainer\.groups_per_step = 2 is below trainer\.layout\.data = 4"):
        load_config(LOCAL, {"trainer.layout.data": 4, "trainer.groups_per_step": 2})


def test_a_cache_that_would_cut_responses_short_is_refused_unless_the_engines_are_others() -> None:
    long: dict[str, Any] = {"rollout.max_new_tokens": 400, "engine.max_total_tokens": 400}
    with pytest.raises(ConfigError, match=r"engine\.max_total_tokens = 400 .*cut responses short"):
        load_config(LOCAL, long)
    assert load_config(LOCAL, {**long, "engine.max_total_tokens": None}).engine.max_total_tokens is None
    assert load_config(LOCAL, {**long, "engine.urls": ["http://e:30000"]}).engine.urls


def test_evaluations_that_could_not_be_told_apart_are_refused() -> None:
    twice: list[dict[str, Any]] = [{"name": "max-digit"}, {"name": "max-digit", "seed": 2}]
    with pytest.raises(ConfigError, match=r"evaluation\.tasks: two of them are called 'max-digit'"):
        load_config(LOCAL, {"evaluation": {"tasks": twice}})
    assert load_config(LOCAL, {"evaluation": {"tasks": [twice[0], {**twice[1], "label": "other"}]}}).evaluation.tasks


def test_the_gate_rate_steers_the_bound_only_where_it_follows_the_lag() -> None:
    by_gate = {"lag.adaptive": {"figure": "gate_rate", "budget": 0.2}}
    for loss in ({"name": "sat-grpo"}, {"name": "grpo", "sat": {"scope": "lagged"}}):
        with pytest.raises(ConfigError, match=r"lag\.adaptive\.figure is gate_rate"):
            load_config(LOCAL, {**by_gate, "trainer.loss": loss})
    lagged = {"name": "sat-grpo", "sat": {"scope": "lagged"}}
    assert load_config(LOCAL, {**by_gate, "trainer.loss": lagged}).lag.adaptive is not None


def test_engines_whose_ports_would_go_past_the_last_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="need port 65536"):
        load_config(LOCAL, {"engine": {"port": 65535, "replicas": 2}})


@pytest.mark.parametrize("best", ["a/avg@4", "a/pass@1", "a/pass@4"])
def test_the_best_checkpoint_goes_by_a_score_that_is_measured(best: str) -> None:
    evaluation = {"tasks": [{"name": "max-digit", "label": "a", "samples": 4}]}
    assert load_config(LOCAL, {"evaluation": {**evaluation, "best": best}}).evaluation.best == best
    for wrong in ("b/avg@4", "a/avg@8", "a/pass@8", "a/pass@3", "a", "max-digit/avg@4"):
        with pytest.raises(ConfigError, match=r"evaluation\.best"):
            load_config(LOCAL, {"evaluation": {**evaluation, "best": wrong}})


def test_a_number_may_be_written_in_any_way_that_yaml_or_a_person_writes_it() -> None:
    for text in ("2.0e-3", "2e-3", "'0.002'"):
        config = load_config(LOCAL, {"trainer.optimizer.learning_rate": parse_yaml(text)})
        assert config.trainer.optimizer.learning_rate == 0.002
    assert load_config(LOCAL, {"task.parameters": {"chat": False}, "engine.metrics": True}).engine.metrics is True


@pytest.mark.parametrize(
    "url", ["redis://:hush@host:6379/0", "rediss://me:hush@host/0", "redis://host/0?password=hush"]
)
def test_a_password_in_the_address_of_redis_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="LAGRANGE_REDIS_PASSWORD") as caught:
        load_config(LOCAL, {"redis.url": url})
    assert "hush" not in str(caught.value)


def test_a_tree_that_is_no_configuration_is_a_message_wherever_it_comes_from() -> None:
    with pytest.raises(ConfigError, match="dump: run: missing"):
        validated({}, "dump")


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff", b"[]", b'{"model_type": "qwen3_moe"}', b'{"model_type": "qwen3_moe", "num_hidden_layers": null}'],
)
def test_a_damaged_config_json_of_a_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    config = load_config(LOCAL, {"model": {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json"):
        sizes_of(config)


def test_a_model_of_another_kind_has_no_known_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    assert sizes_of(load_config(LOCAL, {"model": {"path": str(tmp_path)}})) is None


def test_off_is_a_word_of_its_own_and_a_switch_takes_every_word_for_true_and_false(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = LOCAL.read_text(encoding="utf-8")
    assert "\ntrainer:\n" in text
    for switch in ("off", "no", "False", "false"):
        words = f"\ntrainer:\n  routing_replay: off\n  recompute: {switch}\n"
        file.write_text(text.replace("\ntrainer:\n", words), encoding="utf-8")
        trainer = load_config(file, {"trainer.distributed_optimizer": parse_yaml("true")}).trainer
        assert (trainer.routing_replay, trainer.recompute) == ("off", False)


@pytest.mark.parametrize(
    ("section", "url"),
    [
        ({"host": "10.0.0.7"}, "http://10.0.0.7:8020"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8020"),
        ({"host": "::1"}, "http://[::1]:8020"),
        ({"host": "localhost", "cert_file": "a", "key_file": "b"}, "https://localhost:8020"),
    ],
)
def test_the_address_of_a_service_is_one_that_a_browser_on_its_machine_opens(section: dict[str, str], url: str) -> None:
    assert ServiceSection.model_validate({"port": 8020, **section}).url == url
