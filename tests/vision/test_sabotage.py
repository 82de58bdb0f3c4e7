"""The parity tests with images detect bugs: each listed break of the code makes the named case fail."""

import pytest

from ligermodels.errors import InputError
from tests.sabotage import Sabotage
from tests.vision.test_parity import check_image_parity

POSITIONS = "ligermodels.vision.patch_positions"
PLACES = "ligermodels.vision.image_placer"
SIGLIP = "ligermodels.vision.siglip"
PICTURES = "ligermodels.vision.fixed_size"
TILES = "ligermodels.vision.siglip_tiles"
FEATURES = "ligermodels.generation.image_features"
PREFIX = "ligermodels.vision.siglip"
PIXTRAL = "ligermodels.vision.pixtral"
LINEARS = "ligermodels.vision.tower:LinearProjector"
TOWER = "ligermodels.vision.tower:VisionTower.forward"

BREAKS = {
    "squares in raster order": Sabotage(f"{POSITIONS}:patch_positions", ".transpose(2, 3)", "", "qwen2_vl"),
    "rows and columns of patches swapped": Sabotage(
        f"{POSITIONS}:patch_positions", "squares.flatten(1)", "squares.flatten(1).flip(0)", "qwen2_vl"
    ),
    "window order not undone": Sabotage(f"{PLACES}:GridPlacer.prepare", "places[order]", "places", "qwen2_5_vl"),
    "windows too high": Sabotage(f"{POSITIONS}:window_order", "split(window, 0)", "split(window + 1, 0)", "qwen2_5_vl"),
    "windows ignored": Sabotage(TOWER, "if index in self.windowed", "if False", "qwen2_5_vl"),
    "windows in layers of full attention": Sabotage(TOWER, "if index in self.windowed", "if True", "qwen2_5_vl"),
    "causal tower": Sabotage(TOWER, "causal=False", "causal=True", "qwen2_vl"),
    "images attend to each other": Sabotage(
        f"{POSITIONS}:patch_layout",
        "[grid.h * grid.w for grid in grids for _ in range(grid.t)]",
        "[sum(grid.patches for grid in grids)]",
        "qwen2_vl",
    ),
    "exact GELU for QuickGELU": Sabotage(
        "ligermodels.kernels.activations.plain_activation:quick_gelu", "QUICK_GELU.value", "1.5", "qwen2_vl"
    ),
    "bias of LayerNorm dropped": Sabotage("ligermodels.layers.norm:LayerNorm.forward", "self.bias", "None", "qwen2_vl"),
    "bias of the blocks' LayerNorms dropped": Sabotage(
        "ligermodels.layers.fused:norm_then_linear", "module.bias", "None", "qwen2_vl"
    ),
    "rows and columns of features swapped": Sabotage(
        f"{POSITIONS}:text_positions",
        "torch.stack(torch.meshgrid(*axes",
        "torch.stack(torch.meshgrid(axes[0], axes[2], axes[1]",
        "qwen2_vl",
    ),
    "text behind an image one position early": Sabotage(
        f"{POSITIONS}:text_positions", ".max()) + 1", ".max())", "qwen2_vl"
    ),
    "sections of M-RoPE interleaved": Sabotage(
        "ligermodels.configs.rope:Rope.position_axes", "if not self.mrope_interleaved", "if False", "qwen2_vl"
    ),
    "table of positions transposed": Sabotage(
        f"{POSITIONS}:table_reads",
        "taps[0][:, :, None] * side + taps[1][:, None]",
        "taps[1][:, None] * side + taps[0][:, :, None]",
        "qwen3_vl",
    ),
    "corners of the table not on the image's corners": Sabotage(
        f"{POSITIONS}:table_reads", "* (side - 1) / (sizes - 1).clamp(min=1)", "* side / sizes", "qwen3_vl"
    ),
    "table read one entry late": Sabotage(f"{POSITIONS}:table_reads", "place.floor()", "place.round()", "qwen3_vl"),
    "positions of the table left out": Sabotage(TOWER, "if self.pos_embed is not None and", "if False and", "qwen3_vl"),
    "deepstack a layer late": Sabotage(
        f"{FEATURES}:ImageFeatures.add",
        "self.deepstack[block]",
        "self.deepstack[block - 1]",
        "qwen3_vl",
    ),
    "deepstack of another block": Sabotage(TOWER, "sorted(self.tapped)", "sorted(states)[::-1]", "qwen3_vl"),
    "deepstack of the branch alone": Sabotage(TOWER, "states[index] = x + residual", "states[index] = x", "qwen3_vl"),
    "tanh GELU in the merger": Sabotage(
        "ligermodels.vision.tower:PatchMerger.forward", '"gelu"', '"gelu_tanh"', "qwen3_vl"
    ),
    "exact GELU in the tower": Sabotage(
        "ligermodels.configs.base:kernel_activation", "known[value]", 'known[value].removesuffix("_tanh")', "qwen3_vl"
    ),
    "sections in chunks instead of interleaved": Sabotage(
        "ligermodels.configs.rope:Rope.position_axes", "if not self.mrope_interleaved", "if True", "qwen3_vl"
    ),
    "bias of the patch embedding left out": Sabotage(
        "ligermodels.vision.tower:PatchEmbedding.forward", "self.bias", "None", "qwen3_vl"
    ),
    "tokens of a picture see none behind them": Sabotage(
        f"{SIGLIP}:seen_ahead", "count - 1, -1, -1", "0, -count, -1", "gemma3"
    ),
    "tokens of a picture see one behind it": Sabotage(
        f"{SIGLIP}:seen_ahead", "count - 1, -1, -1", "count, 0, -1", "gemma3"
    ),
    "pictures see beyond the window": Sabotage(
        "ligermodels.kernels.attention.attention_mask:dense_mask",
        "mask.left is not",
        "mask.ahead is mask.left is not",
        "gemma3",
    ),
    "patches of a picture in raster order": Sabotage(
        f"{PICTURES}:picture_patches", "permute(0, 2, 5, 3, 6,", "permute(0, 2, 3, 5, 6,", "gemma3"
    ),
    "largest of the pooled features": Sabotage(f"{SIGLIP}:PooledProjector.forward", ".mean(1)", ".amax(1)", "gemma3"),
    "norm of the projector left out": Sabotage(
        f"{SIGLIP}:PooledProjector.forward", "self.mm_soft_emb_norm(pooled)", "pooled", "gemma3"
    ),
    "last norm of the tower left out": Sabotage(TOWER, "if self.norm is not None", "if False", "gemma3"),
    "class token left among the features": Sabotage(f"{LINEARS}.forward", "[:, 1:]", "[:, :-1]", "llava"),
    "tanh GELU between the linears": Sabotage(f"{LINEARS}.forward", "self.activation, ", '"gelu_tanh", ', "llava"),
    "the branch without the residual stream": Sabotage(f"{LINEARS}.forward", "else x + residual", "else x", "llava"),
    "class token behind the patches": Sabotage(
        TOWER,
        "[self.class_embedding.expand(len(images), 1, -1), images]",
        "[images, self.class_embedding.expand(len(images), 1, -1)]",
        "llava",
    ),
    "first norm of the tower left out": Sabotage(TOWER, "if self.first_norm is not None", "if False", "llava"),
    "positions of the patches without the class token's": Sabotage(
        f"{POSITIONS}:class_token_layout", "entries = row", "entries = patch", "llava"
    ),
    "pictures see each other": Sabotage(
        f"{POSITIONS}:class_token_layout",
        "make_spans([len(row)] * images)",
        "make_spans([len(row) * images, *[0] * (images - 1)])",
        "llava",
    ),
    "features of the last block": Sabotage(
        "ligermodels.configs.vision:FeatureLayerConfig.feature_layers",
        "num_hidden_layers + 1 + layer",
        "num_hidden_layers + 2 + layer",
        "llava",
    ),
    "joined blocks in the order of the tower": Sabotage(
        TOWER, "for index in self.joined]", "for index in sorted(self.joined)]", "llava-three-blocks"
    ),
    "columns of a square before its rows": Sabotage(
        f"{TILES}:SquareProjector.forward",
        "x.view(-1, self.proj.in_features)",
        "x.view(-1, 2, 2, x.shape[-1]).transpose(1, 2).reshape(-1, self.proj.in_features)",
        "smolvlm",
    ),
    "values of a square patch by patch in columns": Sabotage(
        f"{TILES}:SquareProjector.forward",
        "x.view(-1, self.proj.in_features)",
        "x.view(-1, 4, x.shape[-1]).mT.flatten(1)",
        "smolvlm",
    ),
    "positions of a part of a tile not stretched": Sabotage(
        f"{TILES}:padded_tile_layout", "place * side // sizes", "place + 0 * sizes", "smolvlm"
    ),
    "rows and columns of a tile swapped": Sabotage(
        f"{TILES}:padded_tile_layout", "down * side + across", "across * side + down", "smolvlm"
    ),
    "patches of padding seen": Sabotage(f"{TILES}:padded_tile_layout", "bool(shown.all())", "True", "smolvlm"),
    "patches of padding at positions of their own": Sabotage(
        f"{TILES}:padded_tile_layout",
        "torch.where(shown, down * side + across, 0)",
        "(down * side + across).clamp(max=35)",
        "smolvlm",
    ),
    "keys of another tile": Sabotage(
        f"{TILES}:shown_keys", "*make_spans(lengths)", "*make_spans(lengths[::-1])", "smolvlm"
    ),
    "columns turn with the frequencies of rows": Sabotage(
        "ligermodels.layers.rope:axial_shared_frequencies", ".T.flatten()", ".T.flip(0).flatten()", "mistral3"
    ),
    "rows take the higher frequencies": Sabotage(
        "ligermodels.layers.rope:axial_shared_frequencies", ".view(-1, 2).T.flatten()", "", "pixtral"
    ),
    "columns of a patch follow one another in the merger": Sabotage(
        f"{PIXTRAL}:MergingProjector.merged", ".transpose(1, 2)", "", "mistral3"
    ),
    "norm before the merger left out": Sabotage(
        f"{PIXTRAL}:MergingProjector.merged", "= normed.view", "= (x + residual).view", "mistral3"
    ),
    "padding taken for the image": Sabotage(
        f"{PIXTRAL}:PixtralPlacer.place",
        ": grid.h * size, : grid.w * size",
        "-grid.h * size :, -grid.w * size :",
        "pixtral",
    ),
    "columns of features taken for rows": Sabotage(
        f"{PIXTRAL}:PixtralPlacer.place",
        "Grid(1, 1, grid.w) for grid in merged for _ in range(grid.h)",
        "Grid(1, 1, grid.h) for grid in merged for _ in range(grid.w)",
        "mistral3",
    ),
    "tokens of a prompt see none behind them": Sabotage(
        f"{PREFIX}:prompts_seen",
        "torch.arange(length - 1, -1, -1)",
        "torch.zeros(length, dtype=torch.int64)",
        "paligemma",
    ),
    "the last token of a prompt is behind it": Sabotage(
        f"{PREFIX}:prompts_seen", "int(others[0])", "int(others[0]) - 1", "paligemma"
    ),
    "all of a text is its prompt": Sabotage(
        f"{PREFIX}:PrefixPlacer.prepare",
        "token_type_ids.cpu() != 0",
        "token_type_ids.cpu() < 0",
        "paligemma",
    ),
    "bias of the projector left out": Sabotage(
        f"{SIGLIP}:PatchProjector.forward", "x.shape[-1]))", "x.shape[-1])) - self.linear.bias", "paligemma"
    ),
    "features scaled as embeddings are": Sabotage(
        f"{FEATURES}:ImageFeatures.insert", "(embeddings.dtype)", "(embeddings.dtype) * 48**0.5", "paligemma"
    ),
    "no window in Gemma 2 behind a prompt": Sabotage(
        "ligermodels.layers.gemma:gemma2_block",
        "window=config.window(index)",
        "window=None",
        "paligemma-gemma2",
    ),
    "images in reverse": Sabotage(
        f"{PLACES}:next_grid", "waiting[token].popleft()", "waiting[token].pop()", "qwen2_vl"
    ),
}


@pytest.mark.parametrize("name", sorted(BREAKS, key=lambda name: BREAKS[name].case))
def test_a_break_makes_its_parity_case_fail(name, monkeypatch):
    sabotage = BREAKS[name]
    sabotage.apply(monkeypatch)
    with pytest.raises((AssertionError, InputError)):
        check_image_parity(sabotage.case, "row", "cpu")


def test_times_of_a_video_without_seconds_fail(monkeypatch):
    where = "ligermodels.architectures.qwen2_5_vl:Qwen25Placer.frame_interval"
    Sabotage(where, "tokens_per_second * seconds", "tokens_per_second", "").apply(monkeypatch)
    with pytest.raises(AssertionError):
        check_image_parity("qwen2_5_vl", "video", "cpu")
