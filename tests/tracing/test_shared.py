"""Many classes from few traces: which are made, that the rest equals what would have been traced, and what happens where one fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from autofit.errors import AutofitError
from autofit.memory.events import Trace
from autofit.memory.law import compare_structure
from autofit.memory.request import TraceRequest, TraceUnavailable
from autofit.memory.updates import with_updates
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import DEFAULT_OPTIMS
from autofit.problem.spec import Workload
from autofit.tracing.shared import Task, traces_of
from tests.memory.test_updates import Model, Optimizer, traced
from tests.tracing.child import in_child
from tests.tracing.subjects import ARCHITECTURES, make_subject, settings_for

OPTIMS = ("adamw_torch_fused", "adamw_torch", "adafactor", "adamw_bnb_8bit")
WORKLOAD = Workload(model="bert-tiny", seq_len=128)


def request(precision: str = "fp32", checkpointing: bool = False, accumulation: int = 1, optim: str = OPTIMS[0], model: str = "bert-tiny") -> TraceRequest:
    config = TrialConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=checkpointing,
        precision=Precision(precision),
        optim=optim,
    )
    return TraceRequest(workload=replace(WORKLOAD, model=model), config=config, batch=2)


def classes(*requests: TraceRequest) -> dict[str, TraceRequest]:
    return {r.class_key(): r for r in requests}


ALL = classes(
    *(
        request(precision, on, accumulation, optim)
        for optim, on, precision, accumulation in product(OPTIMS, (False, True), ("bf16", "fp16", "fp32"), (2, 1))
    )
)


class Maker:
    """Makes hand-written traces, and remembers which it was asked for."""

    def __init__(self, *, refused: str = "", entangled: str = "") -> None:
        self.rounds: list[list[Task]] = []
        self._refused, self._entangled = refused, entangled

    def __call__(self, tasks: Sequence[Task]) -> list[Trace | AutofitError]:
        self.rounds.append(list(tasks))
        return [self._made(task) for task in tasks]

    def _made(self, task: Task) -> Trace | AutofitError:
        config = task.request.config
        if config.optim == self._refused:
            return TraceUnavailable(f"{self._refused} cannot be traced")
        return whole(task.request, entangled=self._entangled)


def whole(of: TraceRequest, *, entangled: str = "") -> Trace:
    """The trace of one request, each optimizer and each way of stepping with sizes of its own."""
    config = of.config
    scratch = (1000 + OPTIMS.index(config.optim),)
    steps = (of.batch * 4096, 512 + 512 * config.gradient_checkpointing)
    return traced(
        Model(activations=steps, accumulation=config.gradient_accumulation_steps),
        Optimizer(
            scratch=scratch,
            drops_the_flag=config.precision is Precision.FP16,
            drops_a_gradient=config.optim == entangled,
        ),
    )


def test_each_optimizer_is_traced_once_and_one_of_them_in_every_way() -> None:
    maker = Maker()
    found = dict(traces_of(ALL, (2, 4), maker))
    assert len(ALL) == 48
    assert found.keys() == ALL.keys()
    assert [len(tasks) for tasks in maker.rounds] == [12 * 2 + 2 * 3]
    for key, sent in ALL.items():
        assert found[key] == [whole(replace(sent, batch=batch)) for batch in (2, 4)]


def test_optimizers_of_the_search_are_those_that_share() -> None:
    assert set(DEFAULT_OPTIMS) <= set(OPTIMS)


def test_updates_are_traced_after_the_least_work() -> None:
    maker = Maker()
    list(traces_of(classes(request("bf16", True, 8), request("bf16", True, 8, "adafactor")), (2, 4, 1), maker))
    light = maker.rounds[0][-1].request
    assert light.config == TrialConfig(per_device_train_batch_size=2, precision=Precision.BF16, optim="adafactor")
    assert [(t.request.batch, t.smooth, t.costs) for t in maker.rounds[0]] == [
        (2, True, True),
        (4, True, True),
        (1, False, False),
        (2, False, True),
    ]


def test_a_single_class_is_traced_whole() -> None:
    maker = Maker()
    (found,) = traces_of(classes(request(optim="adafactor")), (2, 4), maker)
    assert found[1] == [whole(replace(request(optim="adafactor"), batch=b)) for b in (2, 4)]
    assert len(maker.rounds[0]) == 2


@pytest.mark.parametrize("refused", [OPTIMS[0], OPTIMS[2]], ids=["the lender", "a borrower"])
def test_an_optimizer_that_cannot_be_traced_takes_no_other_with_it(refused: str) -> None:
    found = dict(traces_of(ALL, (2, 4), Maker(refused=refused)))
    for key, sent in ALL.items():
        if sent.config.optim == refused:
            assert all(isinstance(outcome, TraceUnavailable) for outcome in found[key])
        else:
            assert found[key] == [whole(replace(sent, batch=batch)) for batch in (2, 4)]


@pytest.mark.parametrize("entangled", [OPTIMS[0], OPTIMS[3]], ids=["the lender", "a borrower"])
def test_what_does_not_come_apart_is_traced_whole(entangled: str) -> None:
    found = dict(traces_of(ALL, (2, 4), Maker(entangled=entangled)))
    for key, sent in ALL.items():
        assert found[key] == [whole(replace(sent, batch=batch), entangled=entangled) for batch in (2, 4)]


STEPS: dict[str, dict[str, Any]] = {
    "bert": {"precision": Precision.BF16, "accumulation": 2},
    "gpt2": {"precision": Precision.FP16, "accumulation": 2},
    "llama": {"precision": Precision.FP32},
    "t5": {"precision": Precision.PURE_BF16},
}


def _traced(name: str, optim: str, *, batch: int, precision: Precision, accumulation: int = 1, checkpointing: bool = True) -> Trace:
    from autofit.tracing.record import trace_step

    arguments = {"optim": optim, "activation_checkpointing": checkpointing}
    settings = settings_for(batch=batch, length=64, arguments=arguments, precision=precision, accumulation=accumulation)
    return trace_step(make_subject(ARCHITECTURES[name], batch=batch, length=64, device="cuda"), settings)


def _pairs(name: str) -> list[tuple[Trace, Trace]]:
    """(put together, traced whole) of each optimizer."""
    steps = STEPS[name]
    light = {"batch": 2, "checkpointing": False, "precision": steps["precision"]}
    if steps["precision"] is Precision.BF16:
        light["precision"] = Precision.FP32
    lender = _traced(name, OPTIMS[0], batch=3, **steps)
    return [
        (with_updates(lender, _traced(name, optim, **light)), _traced(name, optim, batch=3, **steps))
        for optim in OPTIMS[1:]
    ]


@pytest.mark.parametrize("name", list(STEPS))
def test_steps_and_updates_of_real_models_make_the_trace_of_both(name: str) -> None:
    for made, direct in in_child(_pairs, name):
        compare_structure(made, direct)
        assert made.sizes == direct.sizes
        assert made.marks == direct.marks
        assert made.ops == direct.ops


def _adagrad() -> int:
    from autofit.tracing import estimate_worker

    sent = [request(optim=OPTIMS[0]), request(optim="adagrad")]
    return sum(answer["law"] is not None for answer in estimate_worker.answer(sent, (2, 4)))


def test_an_optimizer_whose_states_are_born_before_the_first_step_has_a_law_all_the_same() -> None:
    assert in_child(_adagrad) == 2


def _late() -> list[str]:
    from autofit.tracing import estimate_worker

    return [a["reason"] for a in estimate_worker.answer([request(), request(optim="adafactor")], (2, 4), patience_seconds=0.0)]


def test_no_trace_begins_when_the_time_is_over() -> None:
    assert in_child(_late) == ["tracing took more than 0 s"] * 2
