"""`autofit estimate` in this process (its mistakes in processes of their own are in `test_bad_input`)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from autofit.cli import main
from autofit.units import MIB
from tests.estimates import FLAGS, GPU, HALF, PLAIN, answers, forbid_children, target


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def from_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are on disk; a child must not be needed."""
    answers()
    forbid_children(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *arguments])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def _document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    status, out, err = _run(capsys, *FLAGS, *arguments, "--json")
    assert (status, err) == (0, "")
    return dict(json.loads(out))


@pytest.mark.usefixtures("from_cache")
class TestAnswer:
    def test_json_is_the_estimate_and_nothing_else(self, capsys: pytest.CaptureFixture[str]) -> None:
        document = _document(capsys, "--batch-size", "8", "--gpu", GPU)
        assert document == next(a for a in answers() if a.config == PLAIN).to_json()

    def test_every_option_reaches_the_configuration(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = (
            "--batch-size",
            "16",
            "--effective-batch",
            "32",
            "--precision",
            "fp16",
            "--checkpointing",
            "on",
        )
        document = _document(capsys, *options, "--optim", "adamw_torch_fused", "--gpu", "tesla t4")
        assert document == next(a for a in answers() if a.config == HALF).to_json()

    def test_a_reader_sees_the_anatomy_the_peaks_and_the_verdict(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, out, err = _run(capsys, *FLAGS, "--batch-size", "8", "--gpu", GPU)
        assert (status, err) == (0, "")
        assert "Fits into 14.6 GiB" in out
        for word in (
            "weights",
            "optimizer state",
            "saved activations",
            "context",
            "peak allocated",
            "peak reserved",
            "least capacity",
        ):
            assert word in out
        assert "\x1b[" not in out
        assert max(map(len, out.splitlines())) <= 80

    def test_what_does_not_fit_is_an_answer_and_no_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = _run(capsys, *FLAGS, "--batch-size", "8", "--gpu", GPU, "--memory", "150MiB")
        assert status == 0
        assert "Does not fit into 150.0 MiB" in out
        assert _document(capsys, "--batch-size", "8", "--gpu", GPU, "--memory", "150MiB")["fits"] is False

    def test_the_largest_batch_is_where_estimates_turn(self, capsys: pytest.CaptureFixture[str]) -> None:
        memory = str(target().context_bytes + 400 * MIB)
        kind = (
            "--precision",
            "fp16",
            "--checkpointing",
            "on",
            "--optim",
            "adamw_torch_fused",
            "--gpu",
            GPU,
            "--memory",
            memory,
        )
        (row,) = _document(capsys, *kind, "--max-batch")["rows"]
        size = row["batch_size"]
        fits = {
            batch: _document(capsys, *kind, "--batch-size", str(batch), "--effective-batch", str(2 * batch))[
                "fits"
            ]
            for batch in (size, size + 1)
        }
        assert fits == {size: True, size + 1: False}

    def test_the_table_of_largest_batches_shows_the_same_number(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        kind = (
            "--precision",
            "fp16",
            "--checkpointing",
            "on",
            "--optim",
            "adamw_torch_fused",
            "--gpu",
            GPU,
            "--max-batch",
        )
        (row,) = _document(capsys, *kind)["rows"]
        status, out, _ = _run(capsys, *FLAGS, *kind)
        assert status == 0
        assert f"{row['batch_size']:,}" in out
        assert "Largest per-device batch of bert-tiny, sequence-classification, length 128, on T4" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--model", "bert-tiny", "--gpu", "RTX 4900"), ("RTX 4900", "RTX 4090")),
        (("--model", "bert-tiny", "--gpu", "A100"), ("ambiguous", "A100-SXM-80GB")),
        (("--model", "bert-tiny", "--batch-size", "0"), ("batch size", "0")),
        (("--model", "bert-tiny", "--batch-size", "-3"), ("batch size", "-3")),
        (("--model", "bert-tiny", "--effective-batch", "0"), ("effective batch", "0")),
        (
            ("--model", "bert-tiny", "--max-batch", "--gpu", "T4", "--effective-batch", "0"),
            ("effective batch", "0"),
        ),
        (("--model", "bert-tiny", "--memory", "-1GiB"), ("-1GiB",)),
        (("--model", "bert-tiny", "--precision", "fp7"), ("fp7", "bf16")),
        (("--gpu", "T4"), ("no model",)),
        (("--model", "bert-tiny", "--batch-size", "many"), ("many",)),
    ],
    ids=lambda value: " ".join(value[-2:]),
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_children(monkeypatch)
    status, out, err = _run(capsys, *arguments)
    assert status == 2
    assert out == ""
    lines = err.strip().splitlines()
    assert [line.partition(":")[0] for line in lines] in (["error"], ["error", "hint"])
    for part in parts:
        assert part in err
