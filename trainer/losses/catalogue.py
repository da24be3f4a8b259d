"""The words of the loss registry, with the defaults of each; without torch, so that `lagrange check` can use it.

Invariant: every loss that `trainer.losses.policy` can compute has exactly one entry here, and a setting that the
chosen loss does not know is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from configs.load import ConfigError
from configs.schema import LossSection, RunConfig, SatSection

Aggregation = Literal["token-mean", "sequence-mean", "constant"]
AdvantageName = Literal["grpo", "dr-grpo", "rloo", "reinforce++"]


@dataclass(frozen=True, slots=True)
class LossEntry:
    """One word of the registry.

    function: name of the loss function behind it. sequence: whether its ratio is one number a sequence. sat: whether
    its clip radii shrink with staleness. batch_threshold: the function needs a threshold over the whole step, hence a
    log-prob pass before the update. parameters: names and defaults of what loss.parameters may set.
    """

    function: str
    source: str
    sequence: bool = False
    sat: bool = False
    batch_threshold: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token-mean"
    advantage: AdvantageName = "grpo"
    parameters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def _entry(function: str, source: str, parameters: dict[str, float] | None = None, **rest: object) -> LossEntry:
    return LossEntry(function, source, parameters=MappingProxyType(parameters or {}), **rest)  # type: ignore[arg-type]


DUAL = {"dual_clip": 0.0}
CLIPPING = ("clipped", "gspo_token", "cispo", "decoupled")  # functions that read the clip radii

CATALOGUE: Mapping[str, LossEntry] = MappingProxyType(
    {
        "grpo": _entry("clipped", "arXiv 2402.03300", DUAL),
        "sat-grpo": _entry("clipped", "arXiv 2607.18722", DUAL, sat=True),
        "dr-grpo": _entry("clipped", "arXiv 2503.20783", DUAL, aggregation="constant", advantage="dr-grpo"),
        "dapo": _entry("clipped", "arXiv 2503.14476", DUAL, clip_high=0.28),
        "gspo": _entry(
            "clipped",
            "arXiv 2507.18071",
            DUAL,
            sequence=True,
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence-mean",
        ),
        "sat-gspo": _entry("clipped", "arXiv 2607.18722", DUAL, sequence=True, sat=True, aggregation="sequence-mean"),
        "gspo-token": _entry(
            "gspo_token",
            "arXiv 2507.18071, section 4.3",
            sequence=True,
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence-mean",
        ),
        "cispo": _entry("cispo", "arXiv 2506.13585", clip_low=0.2, clip_high=0.28),
        "tis": _entry("truncated", "truncated importance sampling, C = 2", {"cap": 2.0}),
        "icepop": _entry("banded", "IcePop", {"low": 0.5, "high": 5.0}),
        "mis": _entry("banded", "masked importance sampling", {"low": 0.5, "high": 5.0}),
        "geo-rs": _entry("geometric_rejection", "geometric rejection", {"low": 0.99, "high": 1.01, "weight": 0.0}),
        "decoupled-ppo": _entry("decoupled", "arXiv 2505.24298 (AReaL)"),
        "m2po": _entry("second_moment", "arXiv 2510.01161", {"threshold": 0.04}, batch_threshold=True),
        "dppo-tv": _entry("total_variation", "arXiv 2602.04879 (DPPO, binary TV)", {"delta": 0.15}),
        "opsm": _entry("off_policy_sequence_mask", "arXiv 2512.02556, off-policy sequence masking", {"delta": 0.1}),
        "estr": _entry("entropy_scaled", "entropy-scaled trust region", {"threshold": 0.1, "epsilon": 1e-2}),
    }
)


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss with all of its settings resolved: nothing is left to a default."""

    name: str
    entry: LossEntry
    clip_low: float
    clip_high: float
    aggregation: Aggregation
    constant_length: int
    advantage: AdvantageName
    entropy_coefficient: float
    reference_kl: float
    parameters: Mapping[str, float]
    sat: SatSection

    @property
    def needs_log_prob_pass(self) -> bool:
        """Whether a forward pass must precede the update: a quantile or threshold over the whole step is wanted."""
        return self.entry.batch_threshold or (self.entry.sat and self.sat.scope == "global")


def resolve(loss: LossSection, max_new_tokens: int) -> LossSettings:
    """Fill in the chosen loss's own defaults. Raises ConfigError for what it does not know, and for contradictions."""
    entry = CATALOGUE.get(loss.name)
    if entry is None:
        raise ConfigError(
            f"trainer.loss.name: {loss.name!r} is not a loss.{_nearest(loss.name, CATALOGUE)} "
            f"Known: {', '.join(sorted(CATALOGUE))}."
        )
    for name in loss.parameters:
        if name not in entry.parameters:
            known = ", ".join(sorted(entry.parameters)) or "none"
            raise ConfigError(
                f"trainer.loss.parameters.{name}: {loss.name} has no such parameter.{_nearest(name, entry.parameters)} "
                f"Known: {known}."
            )
    aggregation = loss.aggregation or entry.aggregation
    if loss.constant_length is not None and aggregation != "constant":
        raise ConfigError(
            f"trainer.loss.constant_length has no effect: {loss.name} is aggregated by {aggregation}. Remove it, or "
            "set trainer.loss.aggregation: constant."
        )
    found = LossSettings(
        name=loss.name,
        entry=entry,
        clip_low=entry.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=entry.clip_high if loss.clip_high is None else loss.clip_high,
        aggregation=aggregation,
        constant_length=loss.constant_length or max_new_tokens,
        advantage=loss.advantage or entry.advantage,
        entropy_coefficient=loss.entropy_coefficient,
        reference_kl=loss.reference_kl,
        parameters=MappingProxyType({**entry.parameters, **loss.parameters}),
        sat=loss.sat,
    )
    if problem := _contradiction(found):
        raise ConfigError(problem)
    return found


def _contradiction(settings: LossSettings) -> str:
    """Why no token could be trained as the loss means it, "" if nothing is wrong."""
    parameters = settings.parameters
    dual, least = parameters.get("dual_clip", 0.0), 1 + settings.clip_high
    if dual and dual <= least:
        return (
            f"trainer.loss.parameters.dual_clip = {dual:g} is not above 1 + clip_high = {least:g}: tokens that moved "
            "as they should would lose their gradient. Set it to 3, or to 0 to switch it off."
        )
    if "low" in parameters and not 0 <= parameters["low"] <= 1 <= parameters["high"]:
        return (
            f"trainer.loss.parameters: the band from low = {parameters['low']:g} to high = {parameters['high']:g} does "
            "not hold 1, the ratio of a token whose policy has not moved. Set low below 1 and high above it."
        )
    useless = [name for name in ("cap", "threshold", "delta", "epsilon") if parameters.get(name, 1.0) <= 0]
    if useless:
        return f"trainer.loss.parameters.{useless[0]} = {parameters[useless[0]]:g} has to be above 0."
    return ""


def loss_settings(config: RunConfig) -> LossSettings:
    """The resolved loss of a run. Raises ConfigError."""
    return resolve(config.trainer.loss, config.rollout.max_new_tokens)


def warnings(settings: LossSettings) -> list[str]:
    """Settings that are legal and do not do what one would hope (specs of SAT: docs/losses.md, "Traps")."""
    found = []
    own = (settings.entry.clip_low, settings.entry.clip_high)
    if settings.entry.function not in CLIPPING and (settings.clip_low, settings.clip_high) != own:
        found.append(f"trainer.loss.clip_low and clip_high have no effect: {settings.name} does not clip. Remove them.")
    if not settings.entry.sat and settings.sat != SatSection():
        found.append(f"trainer.loss.sat has no effect on {settings.name}. Remove it, or choose sat-grpo or sat-gspo.")
    if settings.entry.sat and settings.sat.floor > 0:
        found.append(
            f"trainer.loss.sat.floor = {settings.sat.floor} keeps the effective radius above log(1 + floor x clip): "
            "0.1 switches most of SAT off. Set it to 0."
        )
    if settings.entry.sat and settings.entry.sequence and max(settings.clip_low, settings.clip_high) < 0.01:
        found.append(
            f"sat-gspo with radii {settings.clip_low}/{settings.clip_high}: SAT changes no gradient once its quantile "
            "is above log(1 + clip). Set trainer.loss.clip_low and clip_high to 0.2."
        )
    if settings.entry.sat and settings.entry.sequence and settings.sat.scope == "microbatch":
        found.append(
            "sat-gspo with trainer.loss.sat.scope: microbatch never acts on a micro-batch of one sequence. "
            "Set it to global or lagged."
        )
    if settings.entry.sat and settings.sat.kernel == "hill" and settings.sat.scale == "mad":
        found.append(
            "trainer.loss.sat.scale: mad has no effect on the kernel hill, which is scaled by the quantile. "
            "Choose hill_shift, gauss or laplace."
        )
    return found


def _nearest(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, 1, cutoff=0.65)  # with 0.6, ppo would be a slip of dppo-tv
    return f" Did you mean {close[0]}?" if close else ""
