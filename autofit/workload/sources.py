"""Where a model's config comes from: a local path, the hub's cache, a bundled preset, or the hub.

In that order. A preset goes before the network: its values are the published ones, every trial's child resolves
the name anew, and waiting for an unreachable hub costs more than the trial. Only configs are read, never weights.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autofit.errors import UserError
from autofit.problem import presets

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_NAME = "config.json"
REACH_SECONDS = 2.0
DOWNLOAD_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundConfig:
    """A config and where it was found.

    Attributes:
        config: the config object.
        source: `local`, `cache`, `preset` or `hub`.
    """

    config: PretrainedConfig
    source: str


def find_config(name: str, *, trust_remote_code: bool = False) -> FoundConfig:
    """Return the config that `name` stands for.

    Args:
        name: a directory, a config file, a hub name, or a preset's name.
        trust_remote_code: whether the model's own Python code may run.

    Raises:
        UserError: unknown, unreadable, gated, quantised, or in need of remote code that is not trusted.
    """
    path = Path(name).expanduser()
    if os.path.exists(path):  # unlike Path's own, it takes names that no file can have
        file = _config_file(path)
        origin = str(file.parent if file.name == CONFIG_NAME else file)
        return FoundConfig(config=_read(name, file, origin, trust_remote_code), source="local")
    if _looks_like_path(name):
        raise UserError(
            f"model path {name!r} does not exist", hint="give a directory with a config.json, or a hub name"
        )
    preset = presets.canonical(name)
    cached = _cached(name) or next(filter(None, map(_cached, presets.HUB_NAMES.get(preset or "", ()))), None)
    if cached is not None:
        return FoundConfig(config=_read(name, cached, name, trust_remote_code), source="cache")
    if preset is not None:
        return FoundConfig(config=_from_values(name, presets.load(preset)), source="preset")
    return FoundConfig(config=_read(name, _download(name), name, trust_remote_code), source="hub")


def check_trainable(config: PretrainedConfig, name: str) -> None:
    """Raise UserError when the config asks for quantised weights: those need adapters and real weights."""
    if getattr(config, "quantization_config", None):
        raise UserError(
            f"model {name!r} is quantised, and quantised weights alone cannot be trained",
            hint="name the model it was made from",
        )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1


def _config_file(path: Path) -> Path:
    file = path / CONFIG_NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"directory {str(path)!r} has no {CONFIG_NAME}", hint="give a model saved by save_pretrained"
        )
    return file


def _read(name: str, file: Path, origin: str, trust_remote_code: bool) -> PretrainedConfig:
    """The config in `file`; `origin` (directory or repository) is where its own code would be."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the config of model {name!r} cannot be read: {first_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"the config of model {name!r} is not a JSON object")
    own_code = values.get("auto_map") or {}
    if own_code and trust_remote_code:
        return _remote(name, origin)
    if "AutoConfig" in own_code and not _built_in(values):
        raise remote_code_needed(name)
    return _from_values(name, values)


def remote_code_needed(name: str) -> UserError:
    """The error for a model whose own code would have to run, and may not."""
    return UserError(
        f"model {name!r} runs its own Python code", hint="read that code, then pass --trust-remote-code"
    )


def _built_in(values: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return values.get("model_type") in CONFIG_MAPPING


def _from_values(name: str, values: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    values = dict(values)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str) or not model_type:
        raise UserError(
            f"the config of model {name!r} has no model_type",
            hint="it is not a transformers config, or one from before model_type: add the field",
        )
    if not _built_in({"model_type": model_type}):
        raise UserError(
            f"model {name!r} is of type {model_type!r}, which this transformers does not know",
            hint="upgrade transformers, or pass --trust-remote-code if the model brings its own code",
        )
    try:
        config: PretrainedConfig = AutoConfig.for_model(model_type, **values)
    except Exception as error:  # a config class may raise anything; all of it comes from these values
        raise UserError(f"the config of model {name!r} is invalid: {first_line(error)}") from error
    check_trainable(config, name)
    return config


def _remote(name: str, origin: str) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            origin, trust_remote_code=True, local_files_only=not Path(origin).exists() and not hub_reachable()
        )
    except Exception as error:  # the model's own code may raise anything
        raise UserError(f"the code of model {name!r} failed: {first_line(error)}") from error
    check_trainable(config, name)
    return config


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_NAME)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _download(name: str) -> Path:
    from huggingface_hub import errors, hf_hub_download, is_offline_mode

    hint = presets.suggestion(name)
    if not _possible_on_hub(name):
        raise UserError(f"unknown model {name!r}: not a name that the hub could have", hint=hint)
    if is_offline_mode():
        raise UserError(f"unknown model {name!r} (offline: only local files and bundled presets)", hint=hint)
    if not hub_reachable():
        raise UserError(f"unknown model {name!r}, and the hub cannot be reached", hint=hint)
    try:
        return Path(hf_hub_download(name, CONFIG_NAME, etag_timeout=DOWNLOAD_SECONDS))
    except errors.GatedRepoError:
        raise UserError(
            f"model {name!r} is gated", hint="accept its terms on the hub, then run: hf auth login"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"unknown model {name!r}: not on the hub (or private)", hint=hint) from None
    except errors.LocalEntryNotFoundError:
        raise UserError(f"unknown model {name!r}, and the hub cannot be reached", hint=hint) from None
    except errors.EntryNotFoundError:
        raise UserError(
            f"model {name!r} has no {CONFIG_NAME} on the hub", hint="give a transformers model"
        ) from None
    except OSError as error:  # HfHubHTTPError is one
        raise UserError(f"the hub did not give {name!r}: {first_line(error)}", hint=hint) from None


def _possible_on_hub(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_reachable(timeout_seconds: float = REACH_SECONDS) -> bool:
    """Whether the hub answers at all within the time, one attempt, proxies respected.

    The hub's own client retries for 23 s where there is no network, and name resolution obeys no time-out: hence a
    thread that is left behind.
    """
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def knock() -> None:
        try:
            response = get_session().head(constants.ENDPOINT, timeout=timeout_seconds)
        except Exception:  # the client's error types differ between its versions; any of them means no
            return
        if response.status_code < 500:  # a proxy answers 502 to 504 for a hub that it cannot reach
            answered.set()

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(timeout_seconds + 0.5)
    return answered.is_set()


def first_line(error: BaseException) -> str:
    """The first non-empty line of an exception's text, else its type; never the machine's home directory."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text
