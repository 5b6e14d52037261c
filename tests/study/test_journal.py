"""The study file survives a kill at any byte, and what is not ours is refused and left as it was."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from autofit.errors import StudyError
from autofit.study.journal import IDENTITY as ATTRIBUTE
from autofit.study.journal import stored_identity
from autofit.study.study import TrialStudy
from tests.builders import make_record
from tests.refusals import refused
from tests.studies import (
    IDENTITY,
    SPACE,
    finished_records,
    journal_bytes,
    numberless,
    opened,
    opened_trials,
    whole_lines,
    write_study,
)


def check_prefix(data: bytes) -> None:
    """A file of these bytes loads with every whole record, takes another trial, and loads again."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "study.log"
        path.write_bytes(data)
        raw = opened(path)
        study = TrialStudy(raw, SPACE)
        found = [numberless(record) for record in study.records]
        assert found == finished_records(data)
        numbers = [record.number for record in study.records]
        assert numbers == sorted(set(numbers)), "numbers are unique and in order"
        states = [trial.state for trial in raw.get_trials(deepcopy=False)]
        assert {TrialState.RUNNING, TrialState.WAITING}.isdisjoint(states), "what was in flight has ended"

        proposal = study.ask()
        assert proposal.config is not None
        record = study.tell(proposal, make_record(0, proposal.config, 77.0))
        again = opened_trials(path)
        assert [numberless(r) for r in again.records] == [*found, numberless(record)]
        assert again.records == study.records
        assert path.read_bytes().startswith(data[: data.rfind(b"\n") + 1]), "the journal only grows"
        assert os.listdir(directory) == ["study.log"], "no lock is left behind"


@settings(max_examples=60)
@given(st.integers(0, 1 << 16))
@example(0)
@example(1)
def test_any_prefix_of_a_study_loads_and_can_be_gone_on_with(cut: int) -> None:
    data = journal_bytes()
    check_prefix(data[: cut % (len(data) + 1)])


def test_a_cut_around_the_end_of_any_line_loses_no_whole_record() -> None:
    data = journal_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for end in ends:
        check_prefix(data[:end])
    for end in ends[:3]:
        check_prefix(data[: end - 1])
        check_prefix(data[: end + 1])


@settings(max_examples=10)
@given(st.lists(st.integers(0, 1 << 16), min_size=2, max_size=5))
def test_a_study_survives_one_kill_after_another(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "study.log"
        expected: list[dict[str, Any]] = []
        for number, cut in enumerate(cuts):
            before = path.stat().st_size if path.exists() else 0
            study = opened_trials(path)
            assert [numberless(r) for r in study.records] == expected
            proposal = study.ask()
            assert proposal.config is not None
            study.tell(proposal, make_record(0, proposal.config, 10.0 + number))
            grown = path.stat().st_size
            os.truncate(path, before + cut % (grown - before + 1))
            expected = finished_records(path.read_bytes())
        assert [numberless(r) for r in opened_trials(path).records] == expected


def test_a_lock_of_a_killed_process_is_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    write_study(path)
    program = "import fcntl, sys, time; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        holder.wait()
        begin = time.monotonic()
        opened_trials(path)
        assert time.monotonic() - begin < 5


def test_the_file_is_optunas_own_and_holds_one_study(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    mine = write_study(path)
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
    study = optuna.load_study(study_name=None, storage=storage)
    assert study.study_name == "autofit"
    assert study.best_value == 101.0
    assert len(study.trials) == len(mine.records) + 2  # a repeat, and one in flight


def test_opening_again_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    opened(path)
    before = path.read_bytes()
    opened(path)
    opened(path)
    assert path.read_bytes() == before
    assert len(whole_lines(before)) == 2


def test_optuna_writes_nothing_to_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    level = optuna.logging.get_verbosity()
    opened(tmp_path / "study.log")
    opened(None)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == level


def test_without_a_path_the_study_is_in_memory() -> None:
    study = opened(None)
    assert study.user_attrs[ATTRIBUTE] == IDENTITY
    assert opened(None).trials == []


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with refused("^study file .* is a directory$", hint="path of a file"):
        opened(tmp_path)
    with refused("^study file .* cannot be written: .* is not a directory$"):
        opened(tmp_path / "none" / "study.log")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt2 11aa"}, "another model: bert-tiny 3f2a there, gpt2 11aa here$"),
        ({"bitsandbytes": "0.50", "model": "gpt2 11aa"}, "another model: bert-tiny 3f2a there, gpt2 11aa here$"),
        ({"effective_batch": 16}, "another effective batch: 8 there, 16 here$"),
        ({"memory_limit": 5}, "another memory limit: 1.0 GiB there, 5 B here$"),
        ({"memory_limit": (1 << 30) + 1}, "another memory limit: 1073741824 there, 1073741825 here$"),
        ({"task": "causal-lm"}, "another task: None there, causal-lm here$"),
        ({"torch": "2.13.0"}, "another torch: None there, 2.13.0 here$"),
    ],
)
@pytest.mark.parametrize("torn", [b"", b'{"op_code": 4, "wor'], ids=["whole", "torn"])
def test_a_study_of_other_conditions_is_refused_by_what_differs(
    tmp_path: Path, change: dict[str, Any], message: str, torn: bytes
) -> None:
    path = tmp_path / "study.log"
    path.write_bytes(journal_bytes() + torn)
    with refused(f"^study file .* was made under {message}", hint="another path to --study", kind=StudyError):
        opened(path, {**IDENTITY, **change})
    assert path.read_bytes() == journal_bytes() + torn
    assert os.listdir(tmp_path) == ["study.log"]


def _journal_of(name: str, trials: int) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "other.log"
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))
        study = optuna.create_study(study_name=name, storage=storage)
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=trials)
        return path.read_bytes()


def _middle_broken() -> bytes:
    lines = journal_bytes().split(b"\n")
    lines[3] = lines[3][:-5]
    return b"\n".join(lines)


FOREIGN = {
    "text": b"dear diary\n",
    "text without an end": b"dear diary",
    "a result": json.dumps({"schema": "autofit/result", "version": 1}, indent=2).encode() + b"\n",
    "a result on one line": b'{"schema": "autofit/result"}',
    "lines of JSON": b'{"a": 1}\n{"b": 2}\n',
    "lists": b"[1]\n[2]\n",
    "a number": b"3\n",
    "empty lines": b"\n\n\n",
    "a database": b"SQLite format 3\x00\x10\x00\x01\x01\x00",
    "binary": bytes(range(256)) * 4,
    "a gzip file": b"\x1f\x8b\x08\x00\x00\n\x00\x00",
    "a journal with a broken line": _middle_broken(),
    "a journal after a line of text": b"# my study\n" + journal_bytes(),
    "an unknown operation": b'{"op_code": 99, "worker_id": "w"}\n',
    "operations without a study": b'{"op_code": 4, "worker_id": "w", "study_id": 7}\n',
    "a journal of somebody else": _journal_of("mnist", 2),
    "a journal of somebody else, torn": _journal_of("mnist", 2)[:-7],
    "a journal of our name that is not ours": _journal_of("autofit", 1),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_was(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "study.log"
    path.write_bytes(FOREIGN[kind])
    with refused(f"^study file '{path}' ", hint="another path to --study, or move", kind=StudyError):
        opened(path)
    assert path.read_bytes() == FOREIGN[kind]
    assert os.listdir(tmp_path) == ["study.log"]


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    path.write_bytes(FOREIGN["a journal with a broken line"])
    with refused("is not an Optuna journal: line 4$", kind=StudyError):
        opened(path)
    path.write_bytes(FOREIGN["a journal of somebody else"])
    with refused("holds other Optuna studies: mnist$", kind=StudyError):
        opened(path)
    path.write_bytes(FOREIGN["a journal of our name that is not ours"])
    with refused("was not made by autofit$", kind=StudyError):
        opened(path)
    path.write_bytes(FOREIGN["operations without a study"])
    with refused("is a journal without a study$", kind=StudyError):
        opened(path)
    path.write_bytes(FOREIGN["an unknown operation"])
    with refused("cannot be replayed: ", kind=StudyError):
        opened(path)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_study_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "study.log"
        path.write_bytes(data)
        try:
            opened(path)
        except StudyError:
            assert path.read_bytes() == data
        else:
            assert b'{"op_code":'.startswith(data[:11])


class TestStoredIdentity:
    def test_it_is_what_the_study_was_made_under(self, tmp_path: Path) -> None:
        write_study(tmp_path / "study.log")
        assert stored_identity(tmp_path / "study.log") == IDENTITY

    def test_a_study_that_does_not_exist_or_has_not_begun_has_none(self, tmp_path: Path) -> None:
        assert stored_identity(tmp_path / "study.log") is None
        assert os.listdir(tmp_path) == []
        (tmp_path / "study.log").write_bytes(journal_bytes()[:40])
        assert stored_identity(tmp_path / "study.log") is None

    def test_a_file_that_is_not_a_journal_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "study.log").write_bytes(b"dear diary\n")
        with refused("is not an Optuna journal: line 1$", kind=StudyError):
            stored_identity(tmp_path / "study.log")

    def test_a_directory_is_refused(self, tmp_path: Path) -> None:
        with refused("^study file .* cannot be read: Is a directory$", kind=StudyError):
            stored_identity(tmp_path)


def test_a_disk_that_is_full_is_one_line_and_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "study.log"
    study = opened_trials(path)
    kept = [study.tell(proposal, make_record(0, proposal.config, 77.0)) for proposal in [study.ask()] if proposal.config is not None]
    monkeypatch.setattr(JournalFileBackend, "append_logs", full)
    with refused("^study file '.*study.log' cannot be written: No space left on device$", hint="the same command", kind=StudyError):
        study.ask()
    monkeypatch.undo()
    assert list(opened_trials(path).records) == kept
