"""Models whose linear layers bitsandbytes stores in 4 or 8 bit, with random weights, and what is known of such models' sizes.

The layers, what is left out (the output head, the embeddings) and the model's own marks are those of transformers' `from_pretrained` with a
`BitsAndBytesConfig`, made by transformers' own quantizer. Weights are drawn and quantised one layer at a time, so that building never takes more
memory than training. What is not quantised becomes float32, and everything is frozen, by peft's `prepare_model_for_kbit_training`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from autofit.errors import UserError
from autofit.problem.adaptation import Quantization
from autofit.problem.config import Precision

BLOCK_VALUES, BLOCKS = 64, 256  #: bitsandbytes' block of weights per scale, and of scales per scale of scales
INITIAL_SPREAD = 0.02
CLASSES = {"Params4bit": Quantization.FOUR_BIT, "Int8Params": Quantization.EIGHT_BIT}


def compute_dtype(precision: Precision) -> torch.dtype:
    """dtype in which 4-bit layers multiply: fp16 goes with fp16, everything else with bf16 (the QLoRA recipe)."""
    return torch.float16 if precision is Precision.FP16 else torch.bfloat16


def require() -> None:
    """Check that the packages are there.

    Raises:
        UserError: bitsandbytes is missing, or cannot be imported.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("quantised models need bitsandbytes, which is not installed", hint="pip install bitsandbytes")
    try:
        import bitsandbytes
    except Exception as error:  # a foreign package's import may fail in any way
        text = str(error).splitlines()[0] if str(error) else ""
        raise UserError(f"quantised models need bitsandbytes, which cannot be imported: {type(error).__name__}: {text}") from error
    del bitsandbytes


def supported_devices() -> list[str] | None:
    """Kinds of devices that the installed bitsandbytes runs on; None where it does not say."""
    import bitsandbytes

    found = getattr(bitsandbytes, "supported_torch_devices", None)
    return None if found is None else sorted(found)


def build_quantised(
    make: Callable[[], PreTrainedModel],
    quantization: Quantization,
    *,
    device: str,
    compute: torch.dtype,
    kept: Callable[[PreTrainedModel], Sequence[str]],
) -> PreTrainedModel:
    """Return the model of `make` with quantised random weights on `device`, frozen and ready for an adapter.

    Args:
        make: builds the plain model on the current default device.
        quantization: of all linear layers that transformers would quantise.
        device: `meta` gives the plain model's shapes: nothing is quantised, so that parameters can be counted.
        compute: see `compute_dtype`.
        kept: modules of the plain model that are trained in full, and so stay as they are.

    Raises:
        UserError: bitsandbytes cannot be used here.
    """
    require()
    if torch.device(device).type == "meta":
        return make().requires_grad_(False)
    with _linear_layers_on_meta():
        model = make()
    config = _config(quantization, compute)
    config.llm_int8_skip_modules = skipped_modules(model, kept(model))
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    model.hf_quantizer = quantizer
    quantizer.preprocess_model(model, device_map=None)
    _fill(model, torch.device(device))
    quantizer.postprocess_model(model)
    return _prepared(model)


def _config(quantization: Quantization, compute: torch.dtype) -> BitsAndBytesConfig:
    if quantization is Quantization.EIGHT_BIT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def skipped_modules(model: PreTrainedModel, kept: Sequence[str] = ()) -> list[str]:
    """Names of modules that are not quantised: transformers' own choice (the head, what is tied to it), and `kept`."""
    plain: Any = model
    quantizer = AutoHfQuantizer.from_config(_config(Quantization.FOUR_BIT, torch.bfloat16), pre_quantized=False)
    return sorted({*quantizer.get_modules_to_not_convert(plain, None, plain._keep_in_fp32_modules), *kept})


@contextlib.contextmanager
def _linear_layers_on_meta() -> Iterator[None]:
    """Linear layers that are made in the block take no memory: their weights are drawn later, one at a time."""
    originals = {cls: cls.__init__ for cls in (nn.Linear, Conv1D)}

    def without_memory(init: Callable[..., None]) -> Callable[..., None]:
        def on_meta(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            with torch.device("meta"):
                init(self, *args, **{**kwargs, "device": "meta"} if "device" in kwargs else kwargs)

        return on_meta

    try:
        for cls, init in originals.items():
            cls.__init__ = without_memory(init)  # type: ignore[method-assign]
        yield
    finally:
        for cls, init in originals.items():
            cls.__init__ = init  # type: ignore[method-assign]


def _fill(model: nn.Module, device: torch.device) -> None:
    """Random weights in the place of every parameter without memory; those of bitsandbytes' layers are quantised on the way."""
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _drawn(parameter, device)
            module._parameters[name] = made[id(parameter)]


def _drawn(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    quantised = type(parameter).__name__ in CLASSES
    values = torch.empty(parameter.shape, dtype=torch.float16 if quantised else parameter.dtype, device=device)
    if parameter.ndim > 1:
        values.normal_(0.0, INITIAL_SPREAD)
    else:
        values.zero_()
    if not quantised:
        return nn.Parameter(values, requires_grad=False)
    options = {name: value for name, value in vars(parameter).items() if name not in ("SCB", "_is_hf_initialized")}
    if CLASSES[type(parameter).__name__] is Quantization.EIGHT_BIT:
        values = values.cpu()  # bitsandbytes quantises to 8 bit on the way from the CPU only; transformers goes this way too
    made: Any = type(parameter)(values, requires_grad=False, **options).to(device)  # `to` is what quantises
    if made.element_size() != 1:
        raise RuntimeError(f"bitsandbytes left a {tuple(parameter.shape)} matrix in {made.dtype}: it is not quantised")
    return made  # type: ignore[no-any-return]


def _prepared(model: PreTrainedModel) -> PreTrainedModel:
    """Frozen, and float32 where nothing is quantised; checkpointing is left to TrainingArguments."""
    from peft import prepare_model_for_kbit_training

    prepared: PreTrainedModel = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return prepared


def quantization_of(model: nn.Module) -> Quantization | None:
    """How bitsandbytes stores weights of `model`; None when it does not."""
    return next((found for p in model.parameters() if (found := CLASSES.get(type(p).__name__)) is not None), None)


def count(parameter: nn.Parameter) -> int:
    """Values in a parameter, as before they were packed."""
    state = getattr(parameter, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else parameter.numel()


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the weights on the device, quantisation's own tables included; tied ones count once."""
    total = 0
    for parameter in model.parameters():
        kind = CLASSES.get(type(parameter).__name__)
        if kind is None:
            total += parameter.numel() * parameter.element_size()
        else:
            state = getattr(parameter, "quant_state", None)
            rows = parameter.shape[0] if state is None else state.shape[0]
            total += packed_bytes(count(parameter), rows, kind)
    return total


def quantised_values(model: nn.Module) -> int:
    """Values in quantised matrices."""
    return sum(count(p) for p in model.parameters() if type(p).__name__ in CLASSES)


def planned_bytes(model: Any, quantization: Quantization, kept: Sequence[str]) -> tuple[int, int]:
    """What `stored_bytes` and `quantised_values` will say of a plain model (adapters may be on it already) when it is quantised.

    Args:
        model: on `meta`, where nothing is quantised.
        kept: as for `skipped_modules`.
    """
    base = without_adapters(model)
    skipped = skipped_modules(base, kept)  # type: ignore[arg-type]
    rows = {}
    for name, module in base.named_modules():
        plain = name.removesuffix(".base_layer")
        if type(module) in (nn.Linear, Conv1D) and ".lora_" not in name and should_convert_module(plain, skipped):
            rows[id(module.weight)] = module.weight.shape[1 if isinstance(module, Conv1D) else 0]
    total = values = 0
    for parameter in model.parameters():
        if id(parameter) in rows:
            total += packed_bytes(parameter.numel(), int(rows[id(parameter)]), quantization)  # type: ignore[call-overload]
            values += parameter.numel()
        else:
            total += parameter.numel() * parameter.element_size()
    return total, values


def packed_bytes(values: int, rows: int, kind: Quantization) -> int:
    """Bytes of one quantised matrix of `rows` outputs, and of its tables.

    4 bit: half a byte per value, a byte per block of 64, four per 256 blocks, code tables of 16 and 256 floats, and the mean of the scales.
    8 bit: a byte per value and a float per row.
    """
    if kind is Quantization.EIGHT_BIT:
        return values + 4 * rows
    blocks = -(-values // BLOCK_VALUES)
    return -(-values // 2) + blocks + 4 * -(-blocks // BLOCKS) + 4 * (16 + 256) + 4


def without_adapters(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model; any other model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model
