"""The calls of one episode of an agent, and the trajectories that they become. Pure.

Invariant: tokens that an engine sampled are never encoded again while the agent's messages continue them: a call whose
messages begin with those of an earlier call and its answer, and whose rendered text begins with the text of both, is
asked for with exactly the ids of that call, its answer, and what follows. If nothing went on from there yet it is
the next turn of the same trajectory; else (two calls branch off, or the agent went back) it begins a trajectory of its
own on the same ids. A call that continues nothing, or whose template rewrites earlier answers, begins one on its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from broker.types import Trajectory
from rollout.environments.episode import Episode

Said = tuple[str, str]  # role and content
Encode = Callable[[str], Sequence[int]]


@dataclass(slots=True, eq=False)
class Conversation:
    """One trajectory in the making. busy: a call is drawing its next turn."""

    episode: Episode
    busy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """What an answered call left. ends: the texts that may stand for it, as rendered and without special tokens.

    turns: of the conversation then, so that a later call sees whether it went on.
    """

    said: tuple[Said, ...]
    ends: tuple[str, ...]
    ids: tuple[int, ...]
    conversation: Conversation
    turns: int

    @property
    def open(self) -> bool:
        """Whether the conversation can go on from here."""
        return not self.conversation.busy and self.conversation.episode.turns == self.turns


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call under way. episode: the conversation, with what this call adds to it waiting."""

    said: tuple[Said, ...]
    text: str
    conversation: Conversation
    episode: Episode


@dataclass(slots=True)
class Transcript:
    """All calls of one episode."""

    conversations: list[Conversation] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def begin(self, said: Sequence[Said], text: str, encode: Encode) -> Call:
        """A call. said: its messages; text: what the chat template makes of them. `end` or `abandon` it."""
        said = tuple(said)
        found = self._continued(said, text)
        if found is None:
            conversation = Conversation(Episode(tuple(encode(text))))
        elif found[0].open:
            conversation = found[0].conversation
        else:
            conversation = Conversation(Episode(found[0].ids, engine_id=found[0].conversation.episode.engine_id))
        episode = conversation.episode if found is None else conversation.episode.observed(encode(text[found[1] :]))
        conversation.busy = True
        return Call(said, text, conversation, episode)

    def end(self, call: Call, after: Episode, content: str, content_with_special: str) -> None:
        """The call was answered. after: its episode with the new turn; content: the text that the agent gets."""
        conversation = call.conversation
        conversation.busy = False
        conversation.episode = after
        if after.turns == 1:
            self.conversations.append(conversation)
        ends = tuple(dict.fromkeys((call.text + content_with_special, call.text + content)))
        said = (*call.said, ("assistant", content))
        self.nodes.append(Node(said, ends, (*after.prompt_ids, *after.ids), conversation, after.turns))

    def abandon(self, call: Call) -> None:
        """The call was not answered."""
        call.conversation.busy = False

    @property
    def tokens(self) -> int:
        """Tokens that the model sampled in answered calls."""
        return sum(sum(one.episode.mask) for one in self.conversations)

    def trajectories(self, reward: float) -> tuple[Trajectory, ...]:
        """One for each conversation, all with the episode's reward. Raises InvalidAnswer."""
        return tuple(replace(one.episode, reward=reward).trajectory() for one in self.conversations)

    def _continued(self, said: tuple[Said, ...], text: str) -> tuple[Node, int] | None:
        """The call that this one continues furthest, and where what it adds begins in `text`."""
        found = [
            (len(end), node.open, node)
            for node in self.nodes
            if said[: len(node.said)] == node.said
            for end in node.ends
            if text.startswith(end) and len(text) > len(end)
        ]
        if not found:
            return None
        length, _, node = max(found, key=lambda one: one[:2])
        return node, length
