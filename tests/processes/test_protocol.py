"""What parent and child say to each other survives the wire; what is not ours is unreadable, never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.errors import WorkerError
from autofit.problem.config import TrialConfig
from autofit.processes.protocol import (
    VERSION,
    Event,
    Kind,
    TrialOrder,
    decode_event,
    decode_request,
    encode_event,
    encode_request,
)
from autofit.trials.runner import TrialRequest
from tests.refusals import refused
from tests.strategies import short_text, trial_configs, workloads

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | short_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_text, inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(Kind), st.dictionaries(short_text, json_values, max_size=3))
def test_a_request_survives_the_wire(kind: Kind, payload: dict[str, Any]) -> None:
    assert decode_request(encode_request(kind, payload)) == (kind, payload)


def test_a_request_of_another_version_is_refused() -> None:
    data = json.loads(encode_request(Kind.DESCRIBE, {}))
    with refused(
        f"^protocol {VERSION + 1} instead of {VERSION}: two versions of autofit are mixed$", kind=WorkerError
    ):
        decode_request(json.dumps({**data, "protocol": VERSION + 1}).encode())


@given(st.sampled_from(Event), short_text)
def test_an_event_is_one_line_and_survives_the_wire(event: Event, text: str) -> None:
    line = encode_event(event, name=text)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    message = decode_event(line)
    assert message is not None
    assert (message["event"], message["name"]) == (event, text)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b'"started"\n',
        b"{}\n",
        b'{"event": "elsewhere"}\n',
        b'{"event": ["answer"]}\n',
        b'{"event": {"a": 1}}\n',
        b'{"event": "answer"}\n',
        b'{"event": "answer", "protocol": 99}\n',
        encode_event(Event.ANSWER, payload={})[:-10],
    ],
)
def test_a_line_that_is_not_ours_is_unreadable(line: bytes) -> None:
    assert decode_event(line) is None


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_no_line_makes_the_parent_raise(line: bytes) -> None:
    message = decode_event(line)
    assert message is None or message["event"] in set(Event)


@given(
    st.builds(
        TrialRequest,
        config=trial_configs(),
        memory_limit_bytes=st.none() | st.integers(1, 1 << 45),
        timeout_seconds=st.none() | st.floats(0.1, 1e4),
        full_length=st.booleans(),
        optimizer_steps=st.none() | st.integers(2, 500),
        window_seconds=st.floats(0.1, 60),
        seed=st.integers(0, 1 << 31),
    ),
    workloads(),
    st.integers(0, 1 << 30),
)
def test_an_order_survives_the_wire(request: TrialRequest, workload: Any, context_bytes: int) -> None:
    order = TrialOrder(
        request=request, workload=workload.to_json(), device="cuda:0", context_bytes=context_bytes
    )
    _, payload = decode_request(encode_request(Kind.TRIAL, order.to_json()))
    assert TrialOrder.from_json(payload) == order


def test_an_order_says_the_precision_by_name() -> None:
    config = TrialConfig(per_device_train_batch_size=1)
    order = TrialOrder(request=TrialRequest(config=config), workload={}, device="cpu")
    assert order.to_json()["request"]["config"]["precision"] == "fp32"
