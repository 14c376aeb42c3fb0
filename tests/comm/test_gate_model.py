"""An exhaustive model of the fence: every interleaving, with a death or a deadline at any step.

A rank writes its record for fence k, counts itself in, then looks: the gate has moved, or all are
in (it may move the gate to k + 1), or it gives up (it may move the gate to "k aborted"). Moves of
the gate are one compare-and-swap. Shown for 2 and 3 ranks over 3 fences: no fence has two verdicts,
nobody reads a stale or overwritten record, and who waits can always go on or give up.
"""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.quick

FENCES = 3
WRITE, COUNT, WAIT, READ, DONE, FAILED, DEAD = range(7)


class State(NamedTuple):
    gate: int  # finished fences
    aborted: bool  # the gate is "gate aborted": final
    arrived: int
    at: tuple[int, ...]  # each rank's place: WRITE ... DEAD
    k: tuple[int, ...]  # the fence each rank is at
    records: tuple[tuple[int, int], ...]  # each rank's two slots: number of fence + 1, 0 empty


def moved(state: State, rank: int, at: int, **changes: object) -> State:
    places = (*state.at[:rank], at, *state.at[rank + 1 :])
    return state._replace(at=places, **changes)  # type: ignore[arg-type]


def steps(state: State, rank: int, mask: int) -> Iterator[State]:
    """What a rank may do next; mask 1: two record slots, 0: one."""
    at, k, size = state.at[rank], state.k[rank], len(state.at)
    if at in (DONE, FAILED, DEAD):
        return
    yield moved(state, rank, DEAD)
    if at == WRITE:
        slots = list(state.records[rank])
        slots[k & mask] = k + 1
        records = (*state.records[:rank], (slots[0], slots[1]), *state.records[rank + 1 :])
        yield moved(state, rank, COUNT, records=records)
    elif at == COUNT:
        yield moved(state, rank, WAIT, arrived=state.arrived + 1)
    elif at == WAIT:
        if state.gate == k + 1:
            yield moved(state, rank, READ)
        elif state.aborted:
            yield moved(state, rank, FAILED)
        else:
            if state.arrived >= (k + 1) * size:
                yield state._replace(gate=k + 1)
            yield state._replace(aborted=True)  # a deadline, or a death that it saw
    elif at == READ:
        following = (*state.k[:rank], k + 1, *state.k[rank + 1 :])
        yield moved(state, rank, DONE if k + 1 == FENCES else WRITE, k=following)


def check(state: State, mask: int) -> None:
    for rank, at in enumerate(state.at):
        k = state.k[rank]
        if at == READ:
            # It reads all records of fence k: each is there, and none is of another fence.
            stale = [slots[k & mask] for slots in state.records if slots[k & mask] != k + 1]
            assert not stale, state
        if at == FAILED:
            # Failed at k means that nobody finishes k.
            assert state.aborted and state.gate == k, state
            assert all(other <= k for other in state.k), state
            assert all(self_at != READ or state.k[r] < k for r, self_at in enumerate(state.at))


def explore(size: int, mask: int) -> tuple[int, int]:
    """Visits every state; returns how many there are, and in how many all ranks ended well."""
    start = State(0, False, 0, (WRITE,) * size, (0,) * size, ((0, 0),) * size)
    seen, todo, clean = {start}, [start], 0
    while todo:
        state = todo.pop()
        check(state, mask)
        clean += all(at == DONE for at in state.at)
        for rank, at in enumerate(state.at):
            nexts = list(steps(state, rank, mask))
            # Nobody is stuck: who has not ended can do more than die, without anybody's help.
            assert at in (DONE, FAILED, DEAD) or len(nexts) > 1, state
            for after in nexts:
                assert after.gate >= state.gate and (after.aborted or not state.aborted), (
                    "not final"
                )
                assert not (state.aborted and after.gate != state.gate), "two verdicts"
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
    return len(seen), clean


@pytest.mark.parametrize(("size", "states"), [(2, 343), (3, 3190)])
def test_the_gate_never_has_two_verdicts(size: int, states: int) -> None:
    seen, clean = explore(size, 1)
    assert clean, "no run ends well: the model is wrong"
    assert seen == states, "the model has changed"


def test_one_record_slot_would_not_do() -> None:
    """A planted fault is seen: with one slot a fast rank overwrites what others still read."""
    with pytest.raises(AssertionError):
        explore(2, 0)
