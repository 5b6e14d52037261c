"""What children leave among temporary files goes when they have ended, also when they were killed; and nothing needs more room in a path than there is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.problem.spec import Workload
from autofit.processes.leftovers import PREFIX
from autofit.processes.process import ProcessRunner
from autofit.processes.protocol import SCRATCH
from autofit.processes.temporary import COMPILED, LONGEST, own_directory
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome
from tests.scripts.place import BUILD, CONFIG, PREAMBLE, TRAIN

LITTER = """
import multiprocessing, multiprocessing.connection, tempfile
work = tempfile.TemporaryDirectory(prefix="mywork-")
open(work.name + "/tokens.bin", "wb").write(bytes(1000))
tempfile.NamedTemporaryFile(delete=False)
listener = multiprocessing.connection.Listener(family="AF_UNIX")
assert os.path.isdir(os.path.dirname(listener.address))
import datasets
datasets.disable_caching()
rows = datasets.Dataset.from_list(rows)
rows.save_to_disk(work.name + "/rows")
rows = datasets.load_from_disk(work.name + "/rows").map(lambda row: row)
assert rows.cache_files
"""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for temporary files with a short path."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


def remaining(directory: Path) -> set[str]:
    """What is there but for torch's cache of compiled kernels, which has to serve the next process."""
    return {path.name for path in directory.iterdir() if not path.name.startswith("torchinductor_")}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_temporary_files_of_a_script_go_with_its_process(tmp_path: Path, short: Path, method: str) -> None:
    script = tmp_path / "train.py"
    ends = 'if "kill" in sys.argv: os.kill(os.getpid(), 9)\n'
    script.write_text(PREAMBLE + LITTER + ends + BUILD + TRAIN)
    with ProcessRunner(Workload(model="train.py", script=(str(script), str(tmp_path / "out"))), "cpu", method=method) as runner:
        own = next(path for path in short.iterdir() if path.name.startswith("autofit-"))
        result = runner.run(TrialRequest(config=CONFIG, timeout_seconds=60.0, window_seconds=0.1))
        assert result.outcome is Outcome.COMPLETED, result.failure
        runner.workload = Workload(model="train.py", script=(str(script), str(tmp_path / "out"), "kill"))
        assert runner.run(TrialRequest(config=CONFIG, timeout_seconds=60.0)).outcome is Outcome.FAILED
        assert not any(path.name.startswith("t") for path in own.iterdir())
        assert remaining(short) == {own.name}
    assert remaining(short) == set()


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch, short: Path) -> Path:
    """A runner's directory, and this process in the place of its child."""
    monkeypatch.setenv(SCRATCH, str(short))
    monkeypatch.delenv(COMPILED, raising=False)
    return short


def test_a_child_has_a_directory_of_its_own_and_compiled_kernels_stay_where_they_are(scratch: Path) -> None:
    own_directory()
    own = scratch / f"t{os.getpid()}"
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(own)
    assert own.stat().st_mode & 0o777 == 0o700
    assert Path(os.environ[COMPILED]).parent == scratch
    assert (scratch / f"{PREFIX}{os.getpid()}").exists()
    os.environ.pop(COMPILED)


def test_torch_keeps_them_there_by_default() -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from autofit.processes.temporary import _compiled

    assert _compiled(tempfile.gettempdir()) == default_cache_dir()


def test_where_a_path_would_be_too_long_for_sockets_everything_stays_as_it_is(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = scratch / ("x" * LONGEST)
    deep.mkdir()
    monkeypatch.setenv(SCRATCH, str(deep))
    own_directory()
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(scratch)
    assert list(deep.iterdir()) == []
