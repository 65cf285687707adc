"""Which segments move between tiers: touched ones up, idle ones down, within budgets.

         touched, and there is room
         touched 3 ticks in a row, and hotter than what goes
    slow ---------------------------------------------------> fast
         <---------------------------------------------------
         idle, and the tier is too full or unsteady
         displaced by a hotter one

The rules see what processes report and give commands with a deadline. A command is under way until its end is reported
or its deadline comes; until then nothing else is decided for its segment. What lies where is the processes' word alone:
the rules never assume that a command was carried out.
"""

from __future__ import annotations

from collections.abc import Sequence

from h3kv.policy.migration_draft import Draft
from h3kv.policy.migration_events import expire, fold
from h3kv.policy.migration_moves import demote, keep_claims, promote
from h3kv.policy.migration_state import Event, JitterReported, MigrationState, Plan, RoomReported

__all__ = ["step"]


def step(state: MigrationState, events: Sequence[Event], now_ns: int) -> tuple[MigrationState, Plan]:
    """The state after these events and the plan that follows, both functions of the arguments alone.

    Called with every batch of events, and without any at least once in `tick_ns`: deadlines pass and tiers shrink by
    the clock too. A second call with the same time and no events plans nothing.

    Args:
        state: of the step before; not changed.
        events: in the order in which they happened. A process reports the end of a move before the room after it.
        now_ns: on the caller's clock, which never goes back.

    Cost: in what the events name, by tables that share with those before what did not change; where segments have to go
    from a fast tier also O(segments in it), and O(segments) when a process leaves.
    """
    assert now_ns >= state.now_ns, "the clock went back"
    is_new_tick = now_ns // state.config.tick_ns > state.tick
    if not events and not is_new_tick:
        return state, Plan()
    draft = Draft(state, now_ns)
    for event in events:
        fold(draft, event)
    expire(draft)
    keep_claims(draft)
    promote(draft)
    if is_new_tick or any(isinstance(event, RoomReported | JitterReported) for event in events):
        demote(draft)
    return draft.freeze()
