"""Which tasks a model can do, which it does by default, and how long its samples are."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from autofit.errors import UserError
from autofit.problem.task import Task

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DEFAULT_TEXT_LENGTH = 512
SAMPLING_RATE = 16_000
DEFAULT_AUDIO_SECONDS = 10


#: model types without a table of positions: any length runs
_UNBOUNDED = frozenset(
    {
        "bloom",
        "falcon_mamba",
        "longt5",
        "mamba",
        "mamba2",
        "mpt",
        "mt5",
        "pop2piano",
        "rwkv",
        "switch_transformers",
        "t5",
        "udop",
        "umt5",
        "xlnet",
    }
)
#: model types whose positions start after the padding index (so 514 positions hold 512 tokens)
_OFFSET_BY_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
#: architectures under which encoders are published before they are fine-tuned
_PRETRAINING_HEADS = ("ForMaskedLM", "ForPreTraining", "Model", "Discriminator", "Generator")


def possible_tasks(config: PretrainedConfig) -> tuple[Task, ...]:
    """The tasks that have a model class for this kind of config, in the order of `Task`."""
    remote = getattr(config, "auto_map", None) or {}
    return tuple(task for task in Task if task.auto_class_name in remote or has_class(task, config))


def has_class(task: Task, config: PretrainedConfig | None) -> bool:
    """Whether transformers itself has a class of this model for `task` (and not only the model's own code)."""
    import transformers

    return type(config) in getattr(transformers, task.auto_class_name)._model_mapping


def default_task(config: PretrainedConfig) -> Task:
    """The task this architecture is usually trained for.

    A published head for one task decides (`BertForTokenClassification`). Pre-training heads do not: encoders
    (`BertForMaskedLM`) are trained as sequence classifiers, encoder-decoders as seq2seq, speech encoders with CTC.

    Raises:
        UserError: no task fits the model.
    """
    possible = possible_tasks(config)
    for architecture in getattr(config, "architectures", None) or ():
        task = task_of_class(architecture)
        if task in possible and not architecture.endswith(_PRETRAINING_HEADS):
            return Task(task)
    for task in _preferences(config, possible):
        if task in possible:
            return task
    can = f"it can be tried as {', '.join(possible)}: name one with --task" if possible else None
    raise UserError(
        f"a model of type {config.model_type!r} is usually trained for something that is not searched here",
        hint=can or f"models for these tasks can be searched: {', '.join(Task)}",
    )


def _preferences(config: PretrainedConfig, possible: tuple[Task, ...]) -> tuple[Task, ...]:
    if getattr(config, "is_encoder_decoder", False):
        return (Task.SEQ2SEQ_LM,)
    if Task.MASKED_LM in possible and not getattr(config, "is_decoder", False):
        # an encoder, even where it could also be run as a decoder
        return (Task.CTC, Task.SEQUENCE_CLASSIFICATION, *Task)
    return (Task.CTC, Task.CAUSAL_LM, *Task)


def task_of_class(class_name: str) -> Task | None:
    """The task that a transformers model class (by name) is the head for; None when it is no head."""
    return _tasks_by_class().get(class_name)


@functools.cache
def _tasks_by_class() -> dict[str, Task]:
    import transformers

    found: dict[str, Task] = {}
    for task in Task:
        for names in getattr(transformers, task.auto_class_name)._model_mapping._model_mapping.values():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, task)
    return found


def check_task(task: Task, config: PretrainedConfig) -> None:
    """Raise UserError, naming what is possible, when no class of this model does `task`."""
    possible = possible_tasks(config)
    if task not in possible:
        can = ", ".join(possible) or "none of the known tasks"
        raise UserError(
            f"a {config.model_type} model cannot be trained for {task}", hint=f"this model can do: {can}"
        )


def max_positions(config: PretrainedConfig) -> int | None:
    """The longest sequence of tokens the model has positions for; None when any length runs."""
    text = config.get_text_config()
    if text.model_type in _UNBOUNDED or getattr(text, "position_biased_input", True) is False:
        return None
    names = ("max_position_embeddings", "n_positions", "max_encoder_position_embeddings")
    found = [v for v in (getattr(text, name, None) for name in names) if isinstance(v, int) and v > 0]
    if not found:
        return None
    if text.model_type in _OFFSET_BY_PADDING:
        return max(1, min(found) - (getattr(text, "pad_token_id", None) or 0) - 1)
    return min(found)


def sequence_length(asked: int | None, task: Task, config: PretrainedConfig) -> int:
    """Tokens per sample (audio: samples at 16 kHz; images: patches), checked against the model.

    Args:
        asked: what the user wants, None for the default: 512 or what the model has, audio 10 s.

    Raises:
        UserError: longer than the model's positions, too short for its convolutions, or given for images.
    """
    if task.modality == "image":
        return _image_patches(asked, config)
    if task.modality == "audio":
        return _audio_samples(asked, config)
    limit = max_positions(config)
    if asked is None:
        return DEFAULT_TEXT_LENGTH if limit is None else min(DEFAULT_TEXT_LENGTH, limit)
    if limit is not None and asked > limit:
        raise UserError(
            f"sequence length {asked} is longer than the {limit} positions of this {config.model_type} model",
            hint=f"use --seq-len {limit} or less",
        )
    return asked


def audio_frames(samples: int, config: PretrainedConfig) -> int:
    """Output frames of the convolutional front end: per layer, `(length - kernel) // stride + 1`."""
    frames = samples
    for kernel, stride in zip(getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ())):
        frames = (frames - kernel) // stride + 1
    return frames


def _audio_samples(asked: int | None, config: PretrainedConfig) -> int:
    samples = DEFAULT_AUDIO_SECONDS * SAMPLING_RATE if asked is None else asked
    # SpecAugment needs a span shorter than the sequence; CTC needs more frames than labels.
    shortest = max(4, int(getattr(config, "mask_time_length", 0) or 0) + 1)
    if audio_frames(samples, config) < shortest:
        raise UserError(
            f"sequence length {samples} is too short for a {config.model_type} model: it counts samples of audio",
            hint=f"{SAMPLING_RATE} samples are one second",
        )
    return samples


def _image_patches(asked: int | None, config: PretrainedConfig) -> int:
    if asked is not None:
        raise UserError(
            "a sequence length has no meaning for image-classification",
            hint="leave it out: the image size comes from the model's config",
        )
    height, width = image_size(config)
    patch = getattr(_vision(config), "patch_size", None)
    if not isinstance(patch, int) or patch < 1:
        return 1
    return max(1, (height // patch) * (width // patch))


def image_size(config: PretrainedConfig) -> tuple[int, int]:
    """Height and width in pixels; 224 x 224 where the config does not say (convolutional models)."""
    size: Any = getattr(_vision(config), "image_size", None) or 224
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def image_channels(config: PretrainedConfig) -> int:
    """Colour channels of an image; 3 where the config does not say."""
    return int(getattr(_vision(config), "num_channels", None) or 3)


def _vision(config: PretrainedConfig) -> Any:
    return getattr(config, "vision_config", None) or config
