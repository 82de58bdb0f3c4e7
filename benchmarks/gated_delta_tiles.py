"""python -m benchmarks.gated_delta_tiles: times the gated delta rule with other tiles, on a GPU.

One line for each setting and shape: milliseconds forward, and forward and backward. The first setting is the one used.
"""

from typing import Any

import torch

from benchmarks.checks import fresh_inputs
from benchmarks.gated_delta_rule import SHAPES, SIZE, rule
from benchmarks.timing import median_time
from ligermodels.kernels.linear_attention import delta_gradients, delta_states
from ligermodels.kernels.linear_attention.delta_states import ScanTile, ScanTiles
from ligermodels.kernels.linear_attention.gated_delta_rule import gated_delta_rule

CALLS = 10
USED: dict[str, Any] = {
    "scans": delta_states.DELTA_SCAN_TILES[True],
    "gates": delta_gradients.GATE_GRADIENT_TILES[True],
    "qkv": delta_gradients.QKV_GRADIENT_TILES[True],
}
SCANS = [ScanTile(*tile) for tile in [(32, 4, 2), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 2)]]
SETTINGS: list[dict[str, Any]] = [
    {},
    *({"scans": ScanTiles(tile, tile)} for tile in SCANS),
    *({"gates": tile} for tile in [(32, 4), (32, 8), (64, 8), (128, 8)]),
    *({"qkv": tile} for tile in [(32, 8), (32, 4), (64, 8), (128, 8)]),
]


def main() -> None:
    for shape in SHAPES:
        inputs = fresh_inputs(rule, shape)
        gradient = torch.randn(*shape[:2], shape[3], SIZE, device="cuda", dtype=torch.bfloat16)

        def forward(inputs=inputs, key_heads=shape[2]):
            return gated_delta_rule(*inputs, key_heads, SIZE)[0]

        def both(inputs=inputs, forward=forward, gradient=gradient):
            return torch.autograd.grad(forward(), inputs, gradient)

        for setting in SETTINGS:
            used = {name: tiles[2] for name, tiles in USED.items()}
            for name, tile in setting.items():
                USED[name][2] = tile
            delta_gradients._gradients.cache_clear()
            times = [median_time(function, CALLS) for function in (forward, both)]
            print(shape, setting, *(f"{t:.3f}" for t in times), flush=True)
            for name, tile in used.items():
                USED[name][2] = tile


if __name__ == "__main__":
    main()
