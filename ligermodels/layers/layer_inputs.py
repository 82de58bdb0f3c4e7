"""Per-layer embeddings: each block reads a vector of its own for each token, beside the residual stream.

For layer l of L and token t with embedding x_t: e = table[t], scaled, j = norm(projection(x_t) / sqrt(H)), each of L
vectors; the input of layer l is (j_l + e_l) / sqrt(2). Must not know any family.
"""

from torch import Tensor, nn

from ligermodels.configs.base import Config
from ligermodels.layers.decoder import Decoder
from ligermodels.layers.norm import RMSNorm


class LayerInputDecoder(Decoder):
    """A decoder with per-layer embeddings. vocab_size: rows of their table; size: of a layer's vector."""

    def __init__(self, config: Config, layers: list, vocab_size: int, size: int) -> None:
        super().__init__(config, layers)
        width = len(layers) * size
        self.layer_input_size = size
        self.embed_tokens_per_layer = nn.Embedding(vocab_size, width, padding_idx=config.pad_token_id)
        self.per_layer_model_projection = nn.Linear(config.hidden_size, width, bias=False)
        self.per_layer_projection_norm = RMSNorm(size, config.rms_norm_eps)

    def layer_inputs(self, input_ids: Tensor | None, embeddings: Tensor) -> tuple[Tensor, ...]:
        """L of [B, T, size]. Raises ValueError without token ids."""
        if input_ids is None:
            raise ValueError("forward: inputs_embeds alone are not supported: per-layer embeddings need input_ids")
        size = self.layer_input_size
        table = self.embed_tokens_per_layer(input_ids)
        table = (table * table.new_full((), size**0.5)).unflatten(-1, (-1, size))
        projected = self.per_layer_model_projection(embeddings) * embeddings.shape[-1] ** -0.5
        inputs = (self.per_layer_projection_norm(projected.unflatten(-1, (-1, size))) + table) * 2**-0.5
        return inputs.unbind(2)
