"""The words of the system as types, without I/O, in one place to import from.

`trajectory`: what is trained. `answers`: what the queue says, and the registry's records. `observed`: how a run looks.
"""

from broker.answers import (
    Delivery,
    EngineRecord,
    EngineState,
    Outcome,
    PromptCursor,
    Refused,
    Steered,
    Ticket,
    TrainerState,
    VersionRecord,
)
from broker.observed import DeadLetter, Detail, Event, GroupRecord, GroupState, LagCount, ListedState, Snapshot, Tally
from broker.trajectory import (
    BoolArray,
    Float32Array,
    Group,
    Int32Array,
    InvalidTrajectory,
    RouteArray,
    Trajectory,
    VersionRun,
    check_group,
    check_trajectory,
)

__all__ = [
    "BoolArray",
    "DeadLetter",
    "Delivery",
    "Detail",
    "EngineRecord",
    "EngineState",
    "Event",
    "Float32Array",
    "Group",
    "GroupRecord",
    "GroupState",
    "Int32Array",
    "InvalidTrajectory",
    "LagCount",
    "ListedState",
    "Outcome",
    "PromptCursor",
    "Refused",
    "RouteArray",
    "Snapshot",
    "Steered",
    "Tally",
    "Ticket",
    "TrainerState",
    "Trajectory",
    "VersionRecord",
    "VersionRun",
    "check_group",
    "check_trajectory",
]
