"""python -m benchmarks.gated_delta_tiles: times the gated delta rule with other tiles, on a GPU.

One line for each setting and shape: milliseconds forward, and forward and backward. The first setting is the one used.
"""

from typing import Any

import torch

from benchmarks.checks import fresh_inputs
from benchmarks.gated_delta_rule import SHAPES, SIZE, rule
from benchmarks.timing import median_time
from ligermodels.kernels import delta_outputs, delta_states, document_chunks
from ligermodels.kernels.delta_states import ScanTile
from ligermodels.kernels.gated_delta_rule import gated_delta_rule

CALLS = 10
WIDE: dict[str, Any] = {
    "forward": delta_states.FORWARD_TILES[True],
    "backward": delta_states.BACKWARD_TILES[True],
    "gates": delta_outputs.GATE_GRADIENT_TILES[True],
    "qkv": delta_outputs.QKV_GRADIENT_TILES[True],
}
SETTINGS: list[dict[str, Any]] = [
    {},
    *({"forward": ScanTile(*tile)} for tile in [(32, 4, 2), (32, 4, 3), (64, 8, 1), (64, 8, 2), (64, 4, 1)]),
    *({"backward": ScanTile(*tile)} for tile in [(32, 4, 1), (64, 8, 1), (16, 4, 2), (32, 8, 2)]),
    *({"gates": tile} for tile in [(32, 4), (32, 8), (128, 8)]),
    *({"qkv": tile} for tile in [(32, 8), (32, 4), (128, 8)]),
]


def clear() -> None:
    for function in ("_forward_scan", "_backward_scan"):
        getattr(delta_states, function).cache_clear()
    for function in ("_outputs", "_gradients"):
        getattr(delta_outputs, function).cache_clear()


def main() -> None:
    for shape in SHAPES:
        inputs = fresh_inputs(rule, shape)
        gradient = torch.randn(*shape[:2], shape[3], SIZE, device="cuda", dtype=torch.bfloat16)

        def forward(inputs=inputs, key_heads=shape[2]):
            return gated_delta_rule(*inputs, key_heads, SIZE)[0]

        def both(inputs=inputs, forward=forward, gradient=gradient):
            return torch.autograd.grad(forward(), inputs, gradient)

        for fused in (0.0, float("inf")):
            document_chunks.FUSED_OUTPUT_PROGRAMS = fused
            for setting in SETTINGS:
                used = {name: tiles[2] for name, tiles in WIDE.items()}
                for name, tile in setting.items():
                    WIDE[name][2] = tile
                clear()
                times = [median_time(function, CALLS) for function in (forward, both)]
                outputs = "in the scan" if fused == 0.0 else "apart"
                print(shape, f"outputs {outputs}", setting, *(f"{t:.3f}" for t in times), flush=True)
                for name, tile in used.items():
                    WIDE[name][2] = tile


if __name__ == "__main__":
    main()
