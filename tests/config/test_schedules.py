"""DeepSpeed's schedules: rates and betas that its own classes gave an AdamW of torch, lr 0.02."""

from __future__ import annotations

import pytest

from flatshard import ConfigError, config

pytestmark = pytest.mark.quick

STEPS = (0, 1, 2, 3, 7, 10, 11, 12, 13, 20, 26, 33, 41, 50)

# fmt: off
GOLDEN = [
    ("WarmupLR",
     {"warmup_num_steps": 10},
     [0.0, 0.0, 0.00602059991328, 0.00954242509439, 0.0169019608003, 0.02, 0.02, 0.02, 0.02,
         0.02, 0.02, 0.02, 0.02, 0.02],
     None),
    ("WarmupLR",
     {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_min_lr": 0.0001,
      "warmup_max_lr": 0.003},
     [0.0001, 0.0001, 0.00039, 0.00068, 0.00184, 0.00271, 0.003, 0.003, 0.003, 0.003, 0.003,
         0.003, 0.003, 0.003],
     None),
    ("WarmupDecayLR",
     {"warmup_num_steps": 10, "total_num_steps": 40},
     [0.0, 0.0, 0.000301029995664, 0.00047712125472, 0.000845098040014, 0.001, 0.001,
         0.000966666666667, 0.000933333333333, 0.0007, 0.0005, 0.000266666666667, 0.0, 0.0],
     None),
    ("WarmupCosineLR",
     {"warmup_num_steps": 10, "total_num_steps": 40},
     [0.0, 0.0, 0.00602059991328, 0.00954242509439, 0.0169019608003, 0.02, 0.0199452244318,
         0.0197814978597, 0.0195106141064, 0.0150005, 0.00895581989579, 0.00257029489005, 2e-06,
         2e-06],
     None),
    ("WarmupCosineLR",
     {"warmup_num_steps": 5, "total_num_steps": 30, "warmup_min_ratio": 0.1,
      "cos_min_ratio": 0.2, "warmup_type": "linear"},
     [0.0, 0.002, 0.0056, 0.0092, 0.019748665289, 0.018472135955, 0.0178317490194,
         0.017099391918, 0.0162866143598, 0.009527864045, 0.00498954655965, 0.004, 0.004, 0.004],
     None),
    ("LRRangeTest",
     {"lr_range_test_step_size": 7},
     [0.001, 0.00114285714286, 0.00128571428571, 0.00142857142857, 0.002, 0.00242857142857,
         0.00257142857143, 0.00271428571429, 0.00285714285714, 0.00385714285714,
         0.00471428571429, 0.00571428571429, 0.00685714285714, 0.00814285714286],
     None),
    ("LRRangeTest",
     {"lr_range_test_step_size": 7, "lr_range_test_staircase": True,
      "lr_range_test_step_rate": 5.0},
     [0.001, 0.001, 0.001, 0.001, 0.006, 0.006, 0.006, 0.006, 0.006, 0.011, 0.016, 0.021, 0.026,
         0.036],
     None),
    ("OneCycle",
     {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.01, "cycle_first_step_size": 10,
      "decay_step_size": 5, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01},
     [0.0001, 0.00109, 0.00208, 0.00307, 0.00703, 0.01, 0.00901, 0.00802, 0.00703, 0.0001,
         6.25e-05, 4.34782608696e-05, 3.22580645161e-05, 2.5e-05],
     [0.8, 0.89, 0.88, 0.87, 0.83, 0.8, 0.81, 0.82, 0.83, 0.9, 0.9108, 0.9234, 0.9378, 0.954]),
    ("OneCycle",
     {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.01, "cycle_first_step_size": 12,
      "cycle_second_step_size": 8, "cycle_first_stair_count": 3, "cycle_second_stair_count": 4,
      "decay_step_size": 5, "decay_lr_rate": 0.5, "cycle_momentum": False},
     [0.0001, 0.0001, 0.0001, 0.0001, 0.0034, 0.0067, 0.0067, 0.01, 0.007525, 0.0001, 6.25e-05,
         4.34782608696e-05, 3.22580645161e-05, 2.5e-05],
     None),
]
# fmt: on


@pytest.mark.parametrize(("name", "params", "rates", "betas"), GOLDEN)
def test_rates(
    name: str, params: dict[str, object], rates: list[float], betas: list[float] | None
) -> None:
    read = config.deepspeed(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            "scheduler": {"type": name, "params": params},
        },
        world_size=1,
    )
    assert read.schedule is not None and read.optimizer is not None
    rate = read.schedule.rate(read.optimizer.options["lr"])
    assert [rate(step) for step in STEPS] == pytest.approx(rates, rel=1e-10, abs=1e-18)
    moving = read.schedule.betas()
    assert (moving is None) == (betas is None)
    if moving is not None and betas is not None:
        assert [moving(step)[0] for step in STEPS] == pytest.approx(betas, rel=1e-10)
        assert {moving(step)[1] for step in STEPS} == {0.99}


def test_without_betas_nothing_cycles_but_the_rate() -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
    read = config.deepspeed({"optimizer": {"type": "SGD"}, "scheduler": cycle}, world_size=1)
    assert read.schedule is not None and read.schedule.betas() is None
    assert "the optimizer has no betas" in read.table()


def test_what_is_left_open_is_not_used() -> None:
    text = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    read = config.deepspeed({"scheduler": text}, world_size=1, auto={"max_steps": config.LATER})
    assert read.schedule is not None
    assert "filled when training starts" in read.table()
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps was left open"):
        read.schedule.rate(0.1)
    again = config.deepspeed({"scheduler": text}, world_size=1, auto={"max_steps": 2000})
    assert again.schedule is not None and again.schedule.rate(0.1)(1000) > 0
