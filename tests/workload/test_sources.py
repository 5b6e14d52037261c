from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from autofit.errors import UserError
from autofit.problem.spec import Workload
from autofit.workload import models, sources
from tests.workload import tiny

BERT = {"model_type": "bert", **tiny.CONFIGS["bert"]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the machine's hub cache, or the network unless it says so."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def _directory(tmp_path: Path, values: Any) -> Path:
    text = values if isinstance(values, str) else json.dumps(values)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def _cache(name: str, values: dict[str, Any]) -> None:
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(values))


def test_a_directory_and_a_config_file_are_local(tmp_path: Path) -> None:
    directory = _directory(tmp_path, BERT)
    for name in (str(directory), str(directory / "config.json")):
        found = sources.find_config(name)
        assert (found.source, found.config.hidden_size) == ("local", 64)


def test_a_local_directory_goes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    _directory(tmp_path / "gpt2", BERT)
    monkeypatch.chdir(tmp_path)
    assert sources.find_config("gpt2").config.model_type == "bert"


def test_the_hubs_cache_goes_before_a_preset_under_either_name() -> None:
    _cache("google-bert/bert-large-uncased", BERT)
    for name in ("google-bert/bert-large-uncased", "bert-large-uncased"):
        found = sources.find_config(name)
        assert (found.source, found.config.hidden_size) == ("cache", 64)


def test_a_preset_is_used_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Path:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(sources, "_download", never)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = sources.find_config("openai-community/gpt2")
    assert found.source == "preset"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{not json", "cannot be read"),
        ("[1]", "not a JSON object"),
        ({"hidden_size": 64}, "no model_type"),
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({**BERT, "hidden_size": "wide"}, "invalid"),
        (
            {**BERT, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantised",
        ),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig"}}, "its own Python code"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(tmp_path: Path, values: Any, message: str) -> None:
    directory = _directory(tmp_path, values)
    with pytest.raises(UserError, match=message) as caught:
        sources.find_config(str(directory))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./missing", "/no/such/dir", "missing/config.json", "a/b/c"])
def test_a_path_that_does_not_exist_is_said_to_be_one(name: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        sources.find_config(name)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        sources.find_config(str(tmp_path))


def test_an_unknown_name_offline_leads_to_the_nearest_preset() -> None:
    with pytest.raises(UserError, match="offline") as caught:
        sources.find_config("bert-large-uncasd")
    assert caught.value.hint is not None
    assert "bert-large-uncased" in caught.value.hint
    with pytest.raises(UserError, match="not a name"):
        sources.find_config("no such model!")


def test_a_hub_that_never_answers_costs_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(1)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(UserError, match="cannot be reached"):
            sources.find_config("someone/some-model")
        assert time.monotonic() - started < 4


class _Hub(BaseHTTPRequestHandler):
    """The part of the hub's protocol that a config's download uses."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        body = json.dumps(BERT).encode() if "/good/" in self.path else b""
        refusals = {
            "gated": (403, "GatedRepo"),
            "empty": (404, "EntryNotFound"),
            "absent": (404, "RepoNotFound"),
        }
        refusal = next((v for k, v in refusals.items() if f"/{k}/" in self.path), None)
        self.send_response(refusal[0] if refusal else 200)
        if refusal:
            self.send_header("X-Error-Code", refusal[1])
        self.send_header("ETag", '"tag"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_gives_configs_and_its_refusals_are_told_apart(hub: str, tmp_path: Path) -> None:
    # In a process of its own: the hub's client reads its address when it is imported.
    code = """
import sys
from autofit.errors import UserError
from autofit.workload.sources import find_config
for name in sys.argv[1:]:
    try:
        print(find_config(name).source)
    except UserError as error:
        print(error)
"""
    names = ["org/good", "org/good", "org/gated", "org/empty", "org/absent"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    environment = {**kept, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, env=environment, check=True
    )
    first, again, gated, empty, absent = done.stdout.splitlines()
    assert (first, again) == ("hub", "cache")
    assert "gated" in gated
    assert "no config.json" in empty
    assert "not on the hub" in absent


def test_a_models_own_code_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    code = f"""
import pathlib
import torch
from transformers import PretrainedConfig, PreTrainedModel
pathlib.Path({str(ran)!r}).touch()

class OwnConfig(PretrainedConfig):
    model_type = "own_model_of_a_test"
    vocab_size = 10

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(10, 10)
        self.post_init()

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.embedding(input_ids)
        return {{"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}}
"""
    directory = tmp_path / "own"
    directory.mkdir()
    (directory / "code.py").write_text(code)
    auto_map = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}
    _directory(directory, {"model_type": "own_model_of_a_test", "auto_map": auto_map})
    with pytest.raises(UserError, match="its own Python code") as caught:
        models.resolve(Workload(model=str(directory)))
    assert "--trust-remote-code" in str(caught.value.hint)
    assert not ran.exists()
    resolved = models.resolve(Workload(model=str(directory), trust_remote_code=True, seq_len=4))
    assert ran.exists()
    assert str(resolved.task) == "causal-lm"
    assert type(models.build(resolved, device="cpu")).__name__ == "OwnModel"


def test_a_known_config_whose_model_is_own_code_is_not_run_untrusted(tmp_path: Path) -> None:
    values = {"model_type": "vit", "image_size": 64, "auto_map": {"AutoModelForCausalLM": "code.Own"}}
    directory = _directory(tmp_path, values)
    with pytest.raises(UserError, match="its own Python code"):
        models.resolve(Workload(model=str(directory), task="causal-lm"))
