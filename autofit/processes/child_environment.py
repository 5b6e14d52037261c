"""The environment of children: the user's own, with one card visible and nothing that would make a plain Trainer distributed."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.errors import UserError

#: trackers of experiments stay off, whoever calls them
QUIET = {
    "WANDB_DISABLED": "true",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
}


def child_environment(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The user's environment, with what a trial needs and nothing else changed.

    Args:
        device: `cpu` or `cuda:N`; the child sees that one card only (several visible cards mean DataParallel in a plain Trainer).
        environ: the parent's environment.
    """
    env = dict(environ)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        # A spinning OpenMP pool loses 8x and more to one other busy process (measured); sleeping costs a few percent.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        env["CUDA_VISIBLE_DEVICES"] = visible_device(device, environ.get("CUDA_VISIBLE_DEVICES"))
        env["CUDA_DEVICE_ORDER"] = environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    env["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
        "1"  # torch.cuda.is_available() must not initialise CUDA before a fork
    )
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env |= QUIET
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def visible_device(device: str, visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES must say so that the child sees just `device`, which is counted within what the user made visible.

    Raises:
        UserError: the user has hidden that card.
    """
    index = int(device.partition(":")[2] or 0)
    if visible is None:
        return str(index)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if index >= len(names):
        raise UserError(
            f"{device} is not visible: CUDA_VISIBLE_DEVICES is {visible!r}",
            hint="name a visible card, or use --device cpu",
        )
    return names[index]
