"""What PyTorch's own CUDA build chooses for random attention calls, on the card at hand: rows of `tests/data/attention-choices.json`.

    python -m benchmarks.hollow --card a100-80gb -- python -m benchmarks.hollow.attention tests/data/attention-choices.json

The choice is made on the host, by torch's version, the card's compute capability and cuDNN's version, so that a hollow device answers as a card does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.tracing.attention_calls import LETTERS, calls

COUNT, SEED = 1500, 1
NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  #: values of `torch.nn.attention.SDPBackend`


def choices() -> str:
    """A letter for each call."""
    found = []
    for call in calls(COUNT, seed=SEED, device="cuda"):
        chosen = torch._fused_sdp_choice(
            call.query, call.key, call.value, call.mask, call.dropout, call.causal, enable_gqa=call.gqa
        )
        found.append(LETTERS[NAMES[chosen]])
    return "".join(found)


def main() -> None:
    """Add this torch's and this card's row to the file named."""
    path = Path(sys.argv[1])
    data = json.loads(path.read_text()) if path.exists() else {"count": COUNT, "seed": SEED, "letters": LETTERS, "rows": {}}
    version, capability = ".".join(torch.__version__.split(".")[:2]), ".".join(map(str, torch.cuda.get_device_capability()))
    data["rows"][f"torch {version}, capability {capability}"] = {
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "choices": choices(),
    }
    data["rows"] = dict(sorted(data["rows"].items()))
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"{len(data['rows'])} rows in {path}")


if __name__ == "__main__":
    main()
