"""Requests: what they accept, how they travel, which of them share a law; what the worker answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer

from autofit.errors import UserError
from autofit.memory.events import Trace
from autofit.memory.law import MemoryLaw
from autofit.memory.request import TraceRequest
from autofit.memory.roofline import CostLaw
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.tracing import estimate_worker
from tests.tracing.child import in_child, in_fresh_child

SMALL = BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99
)


def request(model: str = "bert-tiny", **changes: Any) -> TraceRequest:
    options = {"precision": Precision.BF16, **changes.pop("config", {})}
    config = TrialConfig(per_device_train_batch_size=4, **options)
    workload = changes.pop("workload", None) or Workload(model=model, seq_len=32)
    return TraceRequest(workload=workload, config=config, batch=4, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch must be a positive integer, got 0"),
        ({"batch": True}, "batch must be a positive integer"),
        ({"seq_len": 0}, "sequence length must be at least 1"),
        ({"compute_capability": "ampere"}, "compute capability is not like 8.0"),
        ({"device_type": "tpu"}, "device type must be cuda or cpu"),
    ],
)
def test_an_impossible_request_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(request(), **change)


def test_a_request_survives_the_journey_as_json() -> None:
    sent = request(seq_len=64, padded=True, config={"extra": (("use_reentrant", True),)})
    assert TraceRequest.from_json(sent.to_json()) == sent
    with pytest.raises(UserError, match="not a trace request"):
        TraceRequest.from_json({"batch": 1})


def test_a_law_is_shared_by_what_makes_the_same_events() -> None:
    here = request(config={"precision": "fp32", "gradient_accumulation_steps": 8})
    same = [
        replace(here, batch=9),
        replace(here, config=here.config.but(gradient_accumulation_steps=2)),
        replace(here, config=here.config.but(precision="tf32")),
        replace(here, config=here.config.but(per_device_train_batch_size=1)),
    ]
    other = [
        replace(here, config=here.config.but(gradient_accumulation_steps=1)),
        replace(here, config=here.config.but(gradient_checkpointing=True)),
        replace(here, padded=True),
        replace(here, compute_capability="9.0"),
        replace(here, max_grad_norm=0.0),
        replace(here, workload=replace(here.workload, seq_len=64)),
    ]
    assert {r.class_key() for r in same} == {here.class_key()}
    assert here.class_key() not in {r.class_key() for r in other}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_worker_answers_laws_in_the_order_of_the_requests(workers: int) -> None:
    requests = [request(), request(config={"optim": "adafactor"}), request()]
    payload = {"requests": [r.to_json() for r in requests], "workers": workers}
    run = in_fresh_child if workers > 1 else in_child
    answers = run(estimate_worker.answer_estimate, payload)["answers"]
    assert [a["key"] for a in answers] == [r.class_key() for r in requests]
    for answer in answers:
        assert answer["reason"] is None
        law, costs = MemoryLaw.from_json(answer["law"]), CostLaw.from_json(answer["costs"])
        assert law.exact(1)
        assert law.predict(64).peak_allocated_bytes > law.predict(8).peak_allocated_bytes
        assert costs.flops(8) == pytest.approx(2 * costs.flops(4), rel=0.01)


def _answer(sent: TraceRequest, batches: tuple[int, ...] = (2, 4)) -> dict[str, Any]:
    return estimate_worker.answer([sent], batches)[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": {"extra": (("torch_compile", True),)}}, "torch_compile: "),
        (
            {"config": {"gradient_checkpointing": True, "extra": (("offload", True),)}},
            "offloaded checkpoints",
        ),
    ],
)
def test_what_cannot_be_traced_has_a_reason_instead_of_a_law(changes: dict[str, Any], reason: str) -> None:
    answer = in_child(_answer, request(**changes))
    assert answer["law"] is None
    assert answer["costs"] is None
    assert reason in answer["reason"]


def _message_of(sent: TraceRequest) -> str:
    try:
        estimate_worker.answer([sent])
    except UserError as error:
        return error.message
    return ""


def test_what_transformers_refuses_is_the_users_mistake() -> None:
    assert "optim foo cannot be used: the installed transformers does not know it" in in_child(_message_of, request(config={"optim": "foo"}))
    assert "nobody/nothing" in in_child(_message_of, request(model="nobody/nothing"))


def _objects(path: Path, **objects: Any) -> Workload:
    path.write_bytes(cloudpickle.dumps(objects))
    return Workload(model="mine", objects_path=str(path), seq_len=16)


def test_a_live_model_is_traced_without_its_weights(tmp_path: Path) -> None:
    live = request(workload=_objects(tmp_path / "m.pkl", model=BertForSequenceClassification(SMALL)))
    built = request(workload=_objects(tmp_path / "c.pkl", config=SMALL))
    a, b = in_child(_answer, live), in_child(_answer, built)
    laws = [MemoryLaw.from_json(x["law"]) for x in (a, b)]
    assert laws[0].base.sizes == laws[1].base.sizes
    assert laws[0].rises == laws[1].rises


class Doubling(Trainer):
    """Runs the model twice."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        first, second = model(**inputs), model(**inputs)
        loss = (first["loss"] + second["loss"]) / 2
        return (loss, first) if return_outputs else loss


def test_the_users_own_trainer_is_the_one_that_is_traced(tmp_path: Path) -> None:
    model = BertForSequenceClassification(SMALL)
    plain = request(workload=_objects(tmp_path / "p.pkl", model=model))
    own = request(workload=_objects(tmp_path / "o.pkl", model=model, trainer_cls=Doubling))
    once, twice = (MemoryLaw.from_json(in_child(_answer, r)["law"]) for r in (plain, own))
    assert sum(twice.base.facts.sdpa.values()) == 2 * sum(once.base.facts.sdpa.values())
    assert twice.predict(4096).peak_allocated_bytes > 1.3 * once.predict(4096).peak_allocated_bytes


class Packed(nn.Parameter):
    """Stands for the weights of a quantised model."""


def test_weights_of_a_special_class_are_refused_by_name() -> None:
    from autofit.memory.request import TraceUnavailable
    from autofit.tracing.subject import replace_tensors

    model = nn.Linear(2, 2)
    model._parameters["weight"] = Packed(torch.ones(2, 2))
    with pytest.raises(TraceUnavailable, match="weights of class Packed have no fake kernels"):
        replace_tensors(model, "cpu")


def test_tied_weights_stay_tied() -> None:
    from autofit.tracing.subject import replace_tensors

    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    replace_tensors(model, "meta")
    assert model[0].weight is model[1].weight
    assert model[0].weight.device.type == "meta"
    assert model[0].weight.requires_grad


def _padded_routes(padded: bool, attention: str | None) -> tuple[dict[str, int], Trace]:
    from autofit.tracing.run import trace

    sent = request(
        workload=Workload(model="bert-tiny", seq_len=32, attn_implementation=attention), padded=padded
    )
    found = trace(sent)
    return dict(found.facts.sdpa), found


def test_padding_and_the_attention_implementation_decide_the_kernel() -> None:
    layers = 2 * 2  # two layers, two steps
    assert in_child(_padded_routes, False, None)[0] == {"flash": layers}
    assert in_child(_padded_routes, True, None)[0] == {"efficient": layers}
    assert in_child(_padded_routes, False, "eager")[0] == {}


class Choosy(BertForSequenceClassification):
    """What it computes depends on its data."""

    def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
        rows = (input_ids > 3).nonzero()
        return super().forward(input_ids + rows.numel(), **more)


def test_an_operator_without_a_fake_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "objects.pkl").write_bytes(cloudpickle.dumps({"model": Choosy(SMALL)}))
    sent = request(workload=Workload(model="<Choosy>", task="sequence-classification", seq_len=32, objects_path=str(tmp_path / "objects.pkl")))
    answer = in_child(_answer, sent)
    assert answer["law"] is None
    assert answer["reason"].startswith("aten.")
    assert "does not run on fake tensors" in answer["reason"]


def test_a_selection_by_label_is_taken_to_select_all_and_says_so() -> None:
    from autofit.tracing.run import trace

    sent = request(workload=Workload(model="deberta-v3-base", seq_len=8))
    notes = in_child(trace, sent).facts.notes
    assert notes == ("a selection by value is taken to select every element",)


@pytest.mark.parametrize(("paged", "plain", "state_bytes"), [("paged_adamw_32bit", "adamw_torch_fused", 8), ("paged_lion_32bit", "lion_32bit", 4)])
def test_paged_state_is_outside_of_the_allocator(paged: str, plain: str, state_bytes: int) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    laws = []
    for optim in (paged, plain):
        answer = in_child(_answer, request(config={"optim": optim}))
        assert answer["reason"] is None
        laws.append(MemoryLaw.from_json(answer["law"]))
    low, high = (law.predict(4).peak_allocated_bytes for law in laws)
    assert 0.85 < (high - low) / (laws[0].base.facts.n_params * state_bytes) < 1.0, "all but small tensors'"
