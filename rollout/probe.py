"""Does a server really do what rollouts need? Asked once after each start, before weight-sync hears of it.

Invariant: passing means that a request came back with token ids, log-probs, version runs and (for a model with experts)
routes, each of the right length, and that the routes were recorded; an option that was not passed on is found here, and
so is a kernel that chooses experts without telling anybody.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from broker.types import RouteArray
from rollout.client import EngineClient, InvalidAnswer, Sampling, parse_sample
from rollout.command import UNCONFIRMED_VERSION

PROMPT_IDS = (3, 4, 5)
SAMPLING = Sampling(temperature=1.0, max_new_tokens=4)


async def probe(client: EngineClient) -> None:
    """Draw two samples and check them. Raises EngineError if there is none, or one lacks something."""
    answers = await client.ask_generate(PROMPT_IDS, 2, SAMPLING, 0)
    for answer in answers:
        sample = parse_sample(_under_a_number(answer), client.checkpoint, len(PROMPT_IDS), 0)
        if sample.routes is not None and not recorded(sample.routes):
            raise InvalidAnswer("routed_experts was never written: set --moe-runner-backend=triton for this engine")


def recorded(routes: RouteArray) -> bool:
    """Whether some token has, in some layer, experts that differ, as top-k's do; a buffer nobody wrote has zeros.

    Dense layers have zeros, too. routes: [rows, layers, top_k].
    """
    ordered = np.sort(routes, axis=-1)
    return bool((ordered[..., 1:] != ordered[..., :-1]).all(axis=-1).any()) or not routes.size


def _under_a_number(answer: Any) -> Any:
    """The answer as if its tokens were of version 0: before weight-sync confirms one there is no number."""
    try:
        spans = answer["meta_info"]["weight_versions"]
        named = [{**s, "version": "0" if s["version"] == UNCONFIRMED_VERSION else s["version"]} for s in spans]
        return {**answer, "meta_info": {**answer["meta_info"], "weight_versions": named}}
    except (KeyError, TypeError) as error:
        raise InvalidAnswer(f"/generate: {error!r}") from error
