"""Every interleaving of small runs of the gradient protocol: nobody waits for ever.

A rank's program is a list of opens (which wait until every rank has summed the slot's last tenant)
and publications; after its last round it settles, which says that it will not come again. A rank
that waits sums what all ranks have published. The slots are those of the real layout.
"""

import itertools
from collections import deque

import pytest

from flatshard import _core
from flatshard.policy import Sharding, resolve

pytestmark = pytest.mark.quick


def slots_of(units, size):
    """[(opens, publishes, slot)] in the order of publishing, from the layout itself."""
    rows = [(f"p{u}", None, (64,), u, True, 0) for u in range(len(units))]
    names = [(f"u{u}", opens, publishes) for u, (opens, publishes) in enumerate(units)]
    policy = resolve(size, sharding=Sharding(3), precision="fp32").core()
    order = _core.layout_describe(rows, names, policy, size)[2]
    return [(opens, publishes, slot) for _, opens, publishes, slot in order]


def program(order, rounds):
    """[("open", red that every rank must have reached) or ("publish",)]."""
    actions, tenants = [], {}
    for r in range(rounds):
        opened = set()
        for k in range(len(order)):
            wanted = [j for j, (opens, _, _) in enumerate(order) if opens <= k <= order[j][1]]
            for j in wanted:
                if j not in opened:
                    opened.add(j)
                    actions.append(("open", tenants.get(order[j][2], 0)))
            tenants[order[k][2]] = r * len(order) + k + 1
            actions.append(("publish",))
    return actions


def deadlocks(order, rounds, *, sum_while_waiting=True):
    """(states reached, those in which some rank is not done and nobody can move).

    Without sum_while_waiting a rank looks once after each publication, and then waits without
    looking.
    """
    size = len(rounds)
    programs = [program(order, n) for n in rounds]
    totals = [n * len(order) for n in rounds]
    published = [
        list(itertools.accumulate((a[0] == "publish" for a in p), initial=0)) for p in programs
    ]

    def ready(at, k):
        """Has every rank published contribution k, or settled without it, and somebody brought
        it?"""
        came = [published[q][at[q]] > k for q in range(size)]
        absent = [at[q] == len(programs[q]) and totals[q] <= k for q in range(size)]
        return any(came) and all(c or a for c, a in zip(came, absent, strict=True))

    def moves(at, red):
        for r in range(size):
            settled = at[r] == len(programs[r])
            blocked = (
                not settled and programs[r][at[r]][0] == "open" and min(red) < programs[r][at[r]][1]
            )
            if not settled and not blocked:
                ahead = at[:r] + (at[r] + 1,) + at[r + 1 :]
                summed = red[r]
                while programs[r][at[r]][0] == "publish" and ready(ahead, summed):
                    summed += 1
                yield ahead, red[:r] + (summed,) + red[r + 1 :]
            if (settled or (blocked and sum_while_waiting)) and ready(at, red[r]):
                yield at, red[:r] + (red[r] + 1,) + red[r + 1 :]

    start = ((0,) * size, (0,) * size)
    seen, queue, stuck = {start}, deque([start]), []
    while queue:
        at, red = queue.popleft()
        following = list(moves(at, red))
        done = all(at[r] == len(programs[r]) for r in range(size))
        if not following and not (done and all(k == max(totals) for k in red)):
            stuck.append((at, red))
        queue.extend(set(following) - seen)
        seen.update(following)
    return len(seen), stuck


UNTIED = [(2, 2), (1, 1), (0, 0)]
TIED = [(0, 3), (2, 2), (1, 1), (0, 0)]
SIX = [(5 - u, 5 - u) for u in range(6)]


@pytest.mark.parametrize("units", [UNTIED, TIED, SIX], ids=["three", "tied", "six"])
@pytest.mark.parametrize("rounds", [(1, 1), (2, 2), (0, 2), (3, 1), (1, 0), (0, 0)])
def test_two_ranks_never_deadlock(units, rounds):
    states, stuck = deadlocks(slots_of(units, 2), rounds)
    assert states > sum(rounds)
    assert stuck == []


@pytest.mark.parametrize("units", [UNTIED, TIED], ids=["three", "tied"])
@pytest.mark.parametrize("rounds", [(1, 1, 1), (2, 1, 0), (0, 0, 2)])
def test_three_ranks_never_deadlock(units, rounds):
    _, stuck = deadlocks(slots_of(units, 3), rounds)
    assert stuck == []


def test_the_model_finds_the_deadlock_of_ranks_that_do_not_sum_while_they_wait():
    _, stuck = deadlocks(slots_of(UNTIED, 2), (2, 2), sum_while_waiting=False)
    assert stuck
