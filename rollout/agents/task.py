"""`agent-jsonl`: an agent of one's own, on the rows of a JSON-lines file (docs/agents.md)."""

from __future__ import annotations

import inspect
from typing import Any

from rollout.tasks.data_set import DataSetTask
from rollout.tasks.own_code import load_function
from rollout.tasks.parameters import Positive, Seconds
from rollout.tasks.types import NoReward, Prompt, Response


class AgentRows(DataSetTask):
    """function: dotted name of `async def agent(base_url, api_key, prompt) -> float`.

    timeout_s: for one episode. calls: most calls of the model in one. Others: as of every data-set task.
    """

    isolated = False

    def __init__(
        self,
        seed: int,
        function: str,
        name: str = "agent-jsonl",
        timeout_s: Seconds = 600.0,
        calls: Positive = 32,
        **parameters: Any,
    ) -> None:
        self._agent = load_function(function)
        if not inspect.iscoroutinefunction(self._agent):
            raise ValueError(f"function: {function!r} is not declared by `async def`")
        self.agent_timeout_s, self.agent_calls = float(timeout_s), int(calls)
        super().__init__(seed, name, **parameters)

    async def run(self, base_url: str, api_key: str, prompt: Prompt) -> float:
        """See AgentTask."""
        return float(await self._agent(base_url, api_key, prompt))

    def reward(self, prompt: Prompt, response: Response) -> float:
        """Not used: the agent gives the reward."""
        raise NoReward("the rewards of this task come from its agent")
