"""Words to integers, and what is refused on the way."""

import pytest

from flatshard.policy import LossScale, MixedPrecision, Offload, Sharding, resolve

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("stage", "gather", "weights", "keep", "slot_per_unit"),
    [
        (0, "view", "shared", 4, True),
        (1, "view", "shared", 1, True),
        (2, "view", "shared", 1, False),
        (3, "view", "shared", 1, False),
        (0, "copy", "whole", 4, True),
        (1, "copy", "whole", 1, True),
        (2, "copy", "whole", 1, False),
        (3, "copy", "shard", 1, False),
    ],
)
def test_stages(stage, gather, weights, keep, slot_per_unit):
    policy = resolve(4, sharding=Sharding(stage, gather=gather), precision="fp32")
    assert (policy.weights, policy.keep, policy.slot_per_unit) == (weights, keep, slot_per_unit)


def test_auto_is_view_on_one_host_and_copy_elsewhere():
    assert resolve(2, sharding=Sharding(), precision="fp32").weights == "shared"
    assert resolve(2, sharding=Sharding(), precision="fp32", one_host=False).weights == "shard"
    with pytest.raises(ValueError, match="one host"):
        resolve(2, sharding=Sharding(gather="view"), precision="fp32", one_host=False)


def test_gradients_as_produced():
    policy = resolve(2, sharding=Sharding(), precision="bf16", produced="bfloat16")
    assert policy.precision.reduce == "bfloat16"
    mix = MixedPrecision(param="bfloat16", master="float32", reduce="float32")
    policy = resolve(2, sharding=Sharding(), precision=mix, produced="bfloat16")
    assert policy.precision.reduce == "float32"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Sharding(4), ValueError, "expected 0, 1, 2 or 3"),
        (lambda: Sharding(True), ValueError, "expected 0, 1, 2 or 3"),
        (lambda: Sharding(partition="rows"), ValueError, "per_parameter"),
        (lambda: Sharding(gather="lazy"), ValueError, "view"),
        (lambda: Sharding(replicate=0), ValueError, "at least 1"),
        (lambda: Sharding(prefetch=-1), ValueError, "0 or more"),
        (lambda: Offload(state="gpu"), ValueError, "device"),
        (lambda: Offload(state="disk"), NotImplementedError, "not offered yet"),
        (lambda: MixedPrecision(param="fp8"), ValueError, "float32"),
        (lambda: MixedPrecision(param="float16"), ValueError, "loss_scale=LossScale"),
        (lambda: MixedPrecision(moments="float16"), ValueError, "vanish"),
        (lambda: LossScale(initial=3.0), ValueError, "power of two"),
        (lambda: LossScale(initial=2.0, minimum=4.0), ValueError, "below minimum"),
        (lambda: LossScale(window=0), ValueError, "at least 1"),
        (lambda: LossScale(factor=1.0), ValueError, "more than 1"),
        (lambda: MixedPrecision(master="float32"), ValueError, "its own master"),
        (lambda: MixedPrecision(param="bfloat16", master="bfloat16"), ValueError, "a master is"),
        (
            lambda: resolve(4, sharding=Sharding(replicate=3), precision="fp32"),
            ValueError,
            "divide",
        ),
        (lambda: resolve(4, sharding=Sharding(), precision="half"), ValueError, "fp32, bf16"),
    ],
)
def test_refusals_name_the_field(make, error, text):
    with pytest.raises(error, match=text):
        make()
