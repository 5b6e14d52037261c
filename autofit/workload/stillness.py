"""Training without chance: dropout, dropped layers, masked spectra and embedding noise are off, while modules stay in training mode.

`torch.nn.functional`'s dropout functions return their input while this is active, so that every dropout module and every call that transformers
makes is covered, and scaled dot-product attention gets a dropout of 0. Stochastic depth and layer dropping are set to 0 where modules or configs
name them. What is left (a model that draws its own random numbers) is told by a control run with another random state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as functional
from torch import nn

DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
RATES = ("drop_prob", "layerdrop", "layer_drop", "drop_path", "drop_path_rate", "p_drop")
CONFIG_RATES = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "drop_path_rate", "mask_time_prob", "mask_feature_prob")


@contextlib.contextmanager
def still() -> Iterator[None]:
    """No dropout in this process while active."""
    kept = {name: getattr(functional, name) for name in (*DROPOUTS, "scaled_dot_product_attention") if hasattr(functional, name)}
    attend: Any = functional.scaled_dot_product_attention

    def same(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return input

    def attend_still(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any) -> Any:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    try:
        for name in kept:
            setattr(functional, name, same if name in DROPOUTS else attend_still)
        yield
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)


def calm(model: nn.Module) -> None:
    """Set what drops whole layers or masks inputs at random to 0, where it is named."""
    for module in model.modules():
        for name in RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name in CONFIG_RATES:
            if isinstance(getattr(config, name, None), float):
                setattr(config, name, 0.0)
        if getattr(config, "apply_spec_augment", False):
            config.apply_spec_augment = False  # type: ignore[union-attr]
