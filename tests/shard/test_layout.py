"""Layouts against a plain restatement: what is covered, by whom, where."""

import itertools

import numpy as np
import pytest

from flatshard import _core
from flatshard._layout import Parameter, core_definition, default_unit
from flatshard.policy import Sharding, resolve

pytestmark = pytest.mark.quick

ALIGN = 64

SHAPES = [(), (0,), (1,), (3,), (64,), (65,), (2, 3), (7, 5), (1, 129), (33, 4, 2)]


def describe(shapes, units_of, size, partition, frozen=(), slot_per_unit=False, units=None):
    parameters = [
        Parameter(f"p{i}", None, shape, unit, trainable=i not in frozen)
        for i, (shape, unit) in enumerate(zip(shapes, units_of, strict=True))
    ]
    last = max(units_of, default=-1)
    units = units or [(f"u{u}", last - u, last - u) for u in range(last + 1)]
    stage = 1 if slot_per_unit else 3
    policy = resolve(size, sharding=Sharding(stage, partition=partition), precision="fp32")
    definition = core_definition(parameters, units)
    return parameters, _core.layout_describe(*definition, policy.core(), size)


@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_segments_cover_every_element_once(partition, size):
    units_of = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    parameters, (_, segs, _, _) = describe(SHAPES, units_of, size, partition)
    seen = [np.zeros(p.numel, int) for p in parameters]
    for cut, unit, param, begin, end, *_ in segs:
        assert 0 <= cut < size
        assert unit == parameters[param].unit
        assert begin < end
        seen[param][begin:end] += 1
    assert all((count == 1).all() for count in seen)


@pytest.mark.parametrize("partition", ["flat", "per_parameter"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_places_are_aligned_and_do_not_overlap(partition, size):
    units_of = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    frozen = (3, 7)
    parameters, (places, segs, _, _) = describe(SHAPES, units_of, size, partition, frozen)
    for unit in range(3):
        ends = 0
        for (_, offset, _), p in zip(places, parameters, strict=True):
            if p.unit == unit:
                assert offset % ALIGN == 0
                assert offset >= ends
                ends = offset + p.numel
    for cut in range(size):
        own_end = state_end = 0
        for _, _, param, begin, end, at, own, pos in (s for s in segs if s[0] == cut):
            assert at == places[param][1] + begin
            assert own % ALIGN == 0 and own >= own_end
            own_end = own + end - begin
            assert (pos < 0) == (param in frozen)
            if pos >= 0:
                assert pos % ALIGN == 0 and pos >= state_end
                state_end = pos + end - begin


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_flat_cuts_are_equal_slices_of_the_unit(size):
    units_of = [0] * len(SHAPES)
    parameters, (places, segs, _, _) = describe(SHAPES, units_of, size, "flat")
    padded = sum(-(-p.numel // ALIGN) * ALIGN for p in parameters)
    slice_n = -(-((padded + size - 1) // size) // ALIGN) * ALIGN
    for cut, _, param, begin, end, at, *_ in segs:
        assert cut * slice_n <= at and at + end - begin <= (cut + 1) * slice_n
        assert at == places[param][1] + begin


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_per_parameter_cuts_are_rows_as_a_chunked_tensor(size):
    units_of = [0] * len(SHAPES)
    parameters, (_, segs, _, _) = describe(SHAPES, units_of, size, "per_parameter")
    for cut, _, param, begin, end, *_ in segs:
        shape = parameters[param].shape or (1,)
        row = parameters[param].numel // shape[0]
        chunk = -(-shape[0] // size)
        assert begin == min(cut * chunk, shape[0]) * row
        assert end == min((cut + 1) * chunk, shape[0]) * row


def test_more_elements_than_32_bits_hold():
    numel = 2**31 + 5
    for size, partition in itertools.product([1, 3], ["flat", "per_parameter"]):
        _, (_, segs, _, _) = describe([(numel,), (3,)], [0, 0], size, partition)
        assert sum(s[4] - s[3] for s in segs if s[2] == 0) == numel
        assert max(s[4] for s in segs if s[2] == 0) == numel


def test_a_size_that_wraps_is_refused():
    with pytest.raises(ValueError, match="overflow"):
        describe([(2**40, 2**40)], [0], 2, "flat")


def test_two_slots_in_turn_and_one_for_a_tie():
    # embed (tied: its gradient begins at the head, place 0, and ends last), three layers, head
    shapes = [(8, 4), (4,), (4,), (4,), (4,)]
    units = [("embed", 0, 4), ("l0", 3, 3), ("l1", 2, 2), ("l2", 1, 1), ("head", 0, 0)]
    _, (_, _, order, slots) = describe(shapes, [0, 1, 2, 3, 4], 2, "flat", units=units)
    assert [u for u, *_ in order] == [4, 3, 2, 1, 0]
    assert [publishes for _, _, publishes, _ in order] == [0, 1, 2, 3, 4]
    assert order[-1][1] == 0, "the tied unit opens with the head"
    turn = [slot for unit, _, _, slot in order if unit != 0]
    assert all(a != b for a, b in itertools.pairwise(turn))
    assert order[-1][3] not in turn
    assert len(slots) == 3
    assert slots[order[-1][3]] == 64


def test_a_slot_per_unit():
    shapes = [(8, 4), (4,), (100,)]
    _, (_, _, order, slots) = describe(shapes, [0, 1, 2], 2, "flat", slot_per_unit=True)
    assert sorted(slot for *_, slot in order) == [0, 1, 2]
    assert sorted(slots) == [64, 64, 128]


def test_frozen_units_have_no_place_in_the_order():
    shapes = [(8,), (4,), (100,)]
    _, (places, _, order, slots) = describe(shapes, [0, 1, 2], 2, "flat", frozen=(1,))
    assert [u for u, *_ in order] == [2, 0]
    assert [publishes for _, _, publishes, _ in order] == [0, 1]
    assert places[1][2] == -1
    assert len(slots) == 2


def test_frozen_parameters_take_no_room_in_slots():
    shapes = [(10_000,), (64,)]
    _, (_, _, _, slots) = describe(shapes, [0, 0], 2, "flat", frozen=(0,))
    assert slots == [64]


@pytest.mark.parametrize(
    ("units", "text"),
    [
        ([("a", 0, 0), ("b", 0, 0)], "both publish at place 0"),
        ([("a", 2, 1), ("b", 0, 0)], "opens at 2, after it publishes at 1"),
    ],
)
def test_contradictory_orders_are_refused(units, text):
    with pytest.raises(ValueError, match=text):
        describe([(4,), (4,)], [0, 1], 2, "flat", units=units)


def test_names_are_unique_ties_included():
    policy = resolve(1, sharding=Sharding(), precision="fp32").core()
    rows = [("a", "b", (2,), 0, True, 0), ("b", None, (2,), 0, True, 0)]
    with pytest.raises(ValueError, match="two parameters are named b"):
        _core.layout_describe(rows, [("u", 0, 0)], policy, 1)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.layers.3.mlp.weight", "model.layers.3"),
        ("w", "w"),
        ("head.weight", "head"),
        ("0.weight", "0"),
        ("a.12.b.3.c", "a.12"),
    ],
)
def test_default_units(name, unit):
    assert default_unit(name) == unit
