import json
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import FileFormatError
from autofit.memory.law import NotAffine
from autofit.memory.roofline import CostLaw
from tests.memory.traces import MIB, training_loop


@dataclass(frozen=True)
class Card:
    fp32_tflops: float = 10.0
    tf32_tflops: float | None = 50.0
    fp16_tflops: float | None = 100.0
    bf16_tflops: float | None = None
    bandwidth_gbps: float = 1000.0


LAW = CostLaw.fit(training_loop(2), training_loop(4))


def test_each_operator_takes_the_longer_of_arithmetic_and_traffic() -> None:
    seconds = LAW.seconds(Card(), 8, launch_seconds=0)
    # Forward 8 GFLOP and backward 16 GFLOP at 10 TFLOP/s; the update only moves 40 MiB.
    assert seconds.micro_step == pytest.approx(24e9 / 10e12)
    assert seconds.update == pytest.approx(40 * MIB / 1000e9)


def test_traffic_decides_where_arithmetic_is_fast() -> None:
    seconds = LAW.seconds(Card(fp32_tflops=1e6), 8, launch_seconds=0)
    assert seconds.micro_step == pytest.approx((8 + 8 + 8) * MIB / 1000e9)


def test_tf32_uses_its_own_peak_where_the_card_has_one() -> None:
    fp32 = LAW.seconds(Card(), 8, launch_seconds=0).micro_step
    assert LAW.seconds(Card(), 8, tf32=True, launch_seconds=0).micro_step == pytest.approx(fp32 / 5)
    assert LAW.seconds(Card(tf32_tflops=None), 8, tf32=True, launch_seconds=0).micro_step == fp32


def test_a_dtype_that_the_card_lacks_runs_at_the_speed_of_fp32() -> None:
    bf16 = replace(LAW, work=tuple(replace(w, dtype="bf16") for w in LAW.work))
    fp16 = replace(LAW, work=tuple(replace(w, dtype="fp16") for w in LAW.work))
    slow = LAW.seconds(Card(), 64, launch_seconds=0).micro_step
    assert bf16.seconds(Card(), 64, launch_seconds=0).micro_step == slow
    assert fp16.seconds(Card(), 64, launch_seconds=0).micro_step < slow


def test_the_host_is_a_floor_and_views_cost_nothing() -> None:
    seconds = LAW.seconds(Card(), 1, launch_seconds=1.0)
    assert (seconds.micro_step, seconds.update) == (2.0, 2.0)


def test_throughput_counts_every_micro_step_and_one_update() -> None:
    seconds = LAW.seconds(Card(), 8, launch_seconds=0)
    rate = seconds.samples_per_second(batch=8, accumulation=4)
    assert rate == pytest.approx(32 / (4 * seconds.micro_step + seconds.update))


def test_flops_of_a_micro_step_grow_with_the_batch() -> None:
    assert LAW.flops(1) == 3e9
    assert LAW.flops(10) == 30e9


@given(batch=st.integers(1, 512))
def test_a_larger_batch_never_takes_less_time(batch: int) -> None:
    assert LAW.seconds(Card(), batch).micro_step <= LAW.seconds(Card(), batch + 1).micro_step


def test_a_cost_law_survives_json() -> None:
    assert CostLaw.from_json(json.loads(json.dumps(LAW.to_json()))) == LAW


@pytest.mark.parametrize(
    "change", [{"version": 7}, {"work": [["forward"]]}, {"work": [[1] * 9]}, {"span": None}]
)
def test_a_document_that_is_no_cost_law_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FileFormatError):
        CostLaw.from_json({**LAW.to_json(), **change})


def test_other_operators_make_no_law() -> None:
    low, high = training_loop(2), training_loop(4)
    with pytest.raises(NotAffine, match="4 operators against 3"):
        CostLaw.fit(low, replace(high, ops=high.ops[1:]))
    with pytest.raises(NotAffine, match=r"is aten\._fused"):
        CostLaw.fit(low, replace(high, ops=high.ops[::-1]))
    with pytest.raises(NotAffine, match="rising order"):
        CostLaw.fit(high, low)
