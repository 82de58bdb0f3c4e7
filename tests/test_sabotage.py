"""The parity tests detect bugs: each listed break of the code makes the named parity case fail.

test_parity shows that the same check passes for the unbroken code. Breaks of the border between two chunks of the gated
delta rule make the test of its kernels fail.
"""

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.kernels.linear_attention import delta_states, gated_delta_rule
from tests.kernels.linear_attention.test_gated_delta_rule import check_rule, draw
from tests.sabotage import Sabotage, broken_copy
from tests.test_parity import check_parity

CPU = "cpu"  # ops run their reference implementations here, which can be replaced in place; kernels have other tests
ATTENTION = "ligermodels.kernels.attention.attention"
ATTENTION_MASK = "ligermodels.kernels.attention.attention_mask:dense_mask"
QK_NORM = "ligermodels.kernels.attention.qk_norm_rope:qk_norm_rope_reference"
RMS_NORM = "ligermodels.kernels.norms.rms_norm"
ROTATE = "ligermodels.kernels.attention.rope:rotate_reference"
ROUTE = "ligermodels.kernels.moe.experts:route"
SIGMOID = "ligermodels.kernels.moe.experts:route_by_sigmoid"
EXPERTS_REFERENCE = "ligermodels.kernels.moe.experts:experts_reference"
ATTENTION_LAYER = "ligermodels.layers.attention"
BLOCK = "ligermodels.layers.block"
CONFIG = "ligermodels.configs.base"
FEATURES = "ligermodels.configs.features"
DECODER = "ligermodels.layers.decoder"
MOE = "ligermodels.layers.moe"
ROPE = "ligermodels.layers.rope"
ROPE_CONFIG = "ligermodels.configs.rope"
MAPPING = "ligermodels.weights.mapping"
FAMILIES = "ligermodels.architectures"

WINDOWS = {
    "window off by one": Sabotage(ATTENTION_MASK, "distance <= mask.left", "distance < mask.left", "mistral"),
    "window ignored": Sabotage(f"{ATTENTION}:attention", "window >= max", "window >= 0 * max", "qwen2-sliding"),
    "window applied to full-attention layers": Sabotage(
        f"{FEATURES}:SlidingWindowConfig.window", "== SLIDING_ATTENTION", "!= SLIDING_ATTENTION", "gemma2"
    ),
    "layer_types ignored": Sabotage(
        f"{FEATURES}:SlidingWindowConfig.layer_type", "self.layer_types is not None", "False", "qwen2-layer-types"
    ),
    "qwen2: windowed layers shifted": Sabotage(
        f"{FEATURES}:SwitchedWindowConfig.is_sliding",
        "layer >= self.max_window_layers",
        "layer > self.max_window_layers",
        "qwen2-sliding",
    ),
    "qwen2: disabled window applied": Sabotage(
        f"{FEATURES}:SwitchedWindowConfig.is_sliding", "self.use_sliding_window and ", "", "qwen2-unused-window"
    ),
    "qwen2_moe: odd layers windowed": Sabotage(
        f"{FAMILIES}.qwen2_moe:Qwen2MoeConfig.is_sliding", "layer % 2 == 0", "layer % 2 == 1", "qwen2_moe-sliding"
    ),
    "qwen2_moe: upper layers windowed": Sabotage(
        f"{FAMILIES}.qwen2_moe:Qwen2MoeConfig.is_sliding", "layer < self", "layer <= self", "qwen2_moe-sliding"
    ),
    "qwen3: windowed layers shifted": Sabotage(
        f"{FEATURES}:SwitchedWindowConfig.is_sliding", "layer >= self", "layer > self", "qwen3-sliding"
    ),
    "qwen3_moe: disabled window applied": Sabotage(
        f"{FAMILIES}.qwen3_moe:Qwen3MoeConfig.is_sliding", "self.use_sliding_window", "True", "qwen3_moe-unused-window"
    ),
    "gemma2: odd layers windowed": Sabotage(
        "ligermodels.configs.text_models:Gemma2Config.is_sliding", "layer % 2 == 0", "layer % 2 == 1", "gemma2"
    ),
    "gemma3: pattern shifted": Sabotage(
        f"{FAMILIES}.gemma3:Gemma3Config.is_sliding", "(layer + 1)", "layer", "gemma3_text"
    ),
    "olmo3: pattern shifted": Sabotage(f"{FAMILIES}.olmo3:Olmo3Config.is_sliding", "(layer + 1)", "layer", "olmo3"),
    "smollm3: window on layers with RoPE": Sabotage(
        f"{FAMILIES}.smollm3:SmolLM3Config.is_sliding", "not self.has_rope", "self.has_rope", "smollm3-sliding"
    ),
}
SCORES = {
    "causal mask strict": Sabotage(
        ATTENTION_MASK, "distance >= -mask.right", "distance > -2 + mask.right", "qwen2-sliding"
    ),
    "attention unscaled": Sabotage(f"{ATTENTION}:sdpa", "scale=scale", "scale=1.0", "llama"),
    "attention softcap dropped": Sabotage(
        f"{ATTENTION}:masked_attention", "if softcap is not None", "if False", "gemma2-attention-softcap"
    ),
    "logit softcap dropped": Sabotage(
        f"{DECODER}:CausalLM.logits", "logits if softcap is None else", "logits if True else", "gemma2-final-softcap"
    ),
    "softcap of the loss dropped": Sabotage(
        f"{DECODER}:CausalLM.logit_options",
        "self.config.logit_softcap",
        "None",
        "gemma2-final-softcap",
    ),
    "query_pre_attn_scalar ignored": Sabotage(
        f"{FEATURES}:SoftcapConfig.attention_scale",
        "self.query_pre_attn_scalar",
        "self.head_dim",
        "gemma2-query-scalar",
    ),
    "attention_multiplier ignored": Sabotage(
        f"{FAMILIES}.granite:Granite.layer",
        "scale=config.attention_multiplier",
        "scale=None",
        "granite-attention-multiplier",
    ),
    "attention_multiplier ignored in granitemoe": Sabotage(
        f"{FAMILIES}.granitemoe:GraniteMoe.layer", "scale=config.attention_multiplier", "scale=None", "granitemoe"
    ),
}
NORMS = {
    "norm's epsilon dropped": Sabotage(f"{RMS_NORM}:rms_norm_reference", " + eps)", " + 1e-2)", "llama"),
    "weight + 1 dropped": Sabotage(f"{RMS_NORM}:rms_norm_reference", " + offset", "", "gemma"),
    "QK-norm after RoPE": Sabotage(
        QK_NORM,
        "rotate_reference(norm(q, q_weight), cos, sin)",
        "norm(rotate_reference(q, cos, sin), q_weight)",
        "qwen3",
    ),
    "keys not normed": Sabotage(QK_NORM, "norm(k, k_weight)", "k", "qwen3"),
    "keys normed with the queries' weight": Sabotage(QK_NORM, "norm(k, k_weight)", "norm(k, q_weight)", "gemma3_text"),
    "joint QK-norm applied per head": Sabotage(
        QK_NORM,
        "return rms_norm_reference(",
        "return rms_norm_reference(x, weight.new_ones(x.shape[-1]), eps) * weight.view(x.shape[2:])"
        " if True else rms_norm_reference(",
        "olmo2",
    ),
    "post-norm as pre-norm": Sabotage(
        f"{BLOCK}:PostNormLayer.forward_block",
        "self.mlp(None, x, residual)\n    x = self.post_feedforward_layernorm(x)",
        "self.mlp(PreNorm(self.post_feedforward_layernorm), x, residual)",
        "olmo2",
    ),
    "norm after attention dropped": Sabotage(
        f"{BLOCK}:SandwichLayer.forward_block", "x = self.post_attention_layernorm(x)", "", "gemma2"
    ),
    "glm4: norms around attention and MLP swapped": Sabotage(
        f"{FAMILIES}.glm4:Glm4.weight_rules",
        'post_attention_layernorm"),\n        Rename(layer + "post_attention_layernorm", layer + "pre_feedforward',
        'pre_feedforward_layernorm"),\n        Rename(layer + "post_attention_layernorm", layer + "post_attention',
        "glm4",
    ),
}
ROTATIONS = {
    "interleaved for half-split": Sabotage(ROTATE, "if interleaved:", "if True:", "llama"),
    "half-split for interleaved": Sabotage(f"{FAMILIES}.glm:Glm.layer", "interleaved=True", "interleaved=False", "glm"),
    "rotation reversed": Sabotage(ROTATE, "first * c - second * s,", "first * c + second * s,", "llama"),
    "linear scaling dropped": Sabotage(
        f"{ROPE}:linear_frequencies", "embeddings) /", "embeddings) + 0 *", "llama-rope-linear"
    ),
    "llama3 blend reversed": Sabotage(f"{ROPE}:llama3_frequencies", "(1 - keep)", "keep", "llama-rope-llama3"),
    "yarn ramp reversed": Sabotage(
        f"{ROPE}:yarn_frequencies", "* ramp + inv_freq", "* (1 - ramp) + inv_freq", "llama-rope-yarn"
    ),
    "yarn attention factor dropped": Sabotage(
        f"{ROPE}:attention_factor", "yarn_mscale(1.0, factor)", "1.0", "llama-rope-yarn"
    ),
    "yarn mscale_all_dim ignored": Sabotage(
        f"{ROPE}:attention_factor", " / yarn_mscale(rope.mscale_all_dim, factor)", "", "llama-rope-yarn-mscale"
    ),
    "yarn always truncated": Sabotage(
        f"{ROPE}:yarn_frequencies", "if rope.truncate", "if True", "llama-rope-yarn-mscale"
    ),
    "yarn in sliding-window layers too": Sabotage(
        f"{ROPE_CONFIG}:read_ropes_by_layer_type",
        "SLIDING_ATTENTION: parse_rope(",
        'SLIDING_ATTENTION: parse_rope(raw.get("rope_scaling") or ',
        "olmo3-rope-yarn",
    ),
    "dynamic theta not stretched": Sabotage(
        f"{ROPE}:DynamicRotaryEmbedding.frequencies", "* stretch", "* 1.0", "llama-rope-dynamic"
    ),
    "longrope: short factors beyond the switch": Sabotage(
        f"{ROPE}:LongRotaryEmbedding.frequencies", "<= trained", ">= 0", "phi3-longrope-long"
    ),
    "longrope: switch off by one": Sabotage(
        f"{ROPE}:LongRotaryEmbedding.frequencies", "<= trained", "<= trained + 1", "phi3-longrope-just-long"
    ),
    "longrope attention factor dropped": Sabotage(
        f"{ROPE}:attention_factor",
        "math.sqrt(1 + math.log(factor) / math.log(trained))",
        "1.0",
        "phi3-longrope-long",
    ),
    "attention_factor ignored": Sabotage(
        f"{ROPE}:attention_factor", "return rope.attention_factor", "return 1.0", "phi3-longrope-attention-factor"
    ),
    "rope_theta ignored": Sabotage(f"{ROPE}:default_frequencies", "rope.rope_theta", "10000.0", "llama"),
    "theta of full-attention layers in all layers": Sabotage(
        f"{FAMILIES}.gemma3:Gemma3Text.layer", "config.layer_type(index)", '"full_attention"', "gemma3_text"
    ),
    "rope_local_base_freq ignored": Sabotage(
        "ligermodels.architectures.gemma3:Gemma3Config.read_ropes",
        'raw.get("rope_local_base_freq") or ',
        "",
        "gemma3_text",
    ),
    "nested rope_parameters mixed up": Sabotage(
        f"{ROPE_CONFIG}:read_ropes_by_layer_type",
        "nested.get(SLIDING_ATTENTION)",
        "nested.get(FULL_ATTENTION)",
        "gemma3_text-nested-rope",
    ),
    "partial_rotary_factor ignored": Sabotage(
        f"{ROPE_CONFIG}:parse_rope",
        "return Rope(**values)",
        'return Rope(**values | {"partial_rotary_factor": 1.0})',
        "phi3-partial-rotary",
    ),
    "glm: whole heads rotated by default": Sabotage(
        f"{CONFIG}:Config.read_ropes", "cls.default_partial_rotary_factor", "1.0", "glm"
    ),
    "NoPE interval inverted": Sabotage(
        f"{FAMILIES}.smollm3:SmolLM3Config.has_rope", "interval != 0", "interval == 0", "smollm3-interval"
    ),
    "NoPE list inverted": Sabotage(
        f"{FAMILIES}.smollm3:SmolLM3Config.has_rope", "return bool(", "return not bool(", "smollm3-no-rope-layers"
    ),
}
EXPERTS = {
    "top-k not renormalised": Sabotage(ROUTE, "if normalize else", "if False else", "mixtral"),
    "top-k renormalised": Sabotage(ROUTE, "if normalize else", "if True else", "qwen2_moe"),
    "w1 and w3 swapped": Sabotage(
        f"{MAPPING}:stacked_experts",
        '(f"{layer}{gate}.weight", f"{layer}{up}.weight")',
        '(f"{layer}{up}.weight", f"{layer}{gate}.weight")',
        "mixtral",
    ),
    "shared expert's gate dropped": Sabotage(f"{MOE}:MoE.forward", "torch.sigmoid(gate(normed)) * ", "", "qwen2_moe"),
    "mlp_only_layers ignored": Sabotage(
        f"{FEATURES}:SparseStepConfig.is_sparse",
        "layer not in (self.mlp_only_layers or ()) and ",
        "",
        "qwen2_moe-mlp-only-layers",
    ),
    "decoder_sparse_step shifted": Sabotage(
        f"{FEATURES}:SparseStepConfig.is_sparse", "(layer + 1)", "layer", "qwen3_moe-sparse-step"
    ),
    "num_local_experts not read": Sabotage(
        f"{CONFIG}:Config.from_dict", "cls.alternative_names.get(name, name)", "name", "qwen3_moe-num-local-experts"
    ),
    "load-balancing loss dropped": Sabotage(
        f"{DECODER}:CausalLM.balance", "config.output_router_logits", "False", "mixtral-aux-loss"
    ),
    "load-balancing loss not weighted": Sabotage(
        f"{DECODER}:CausalLM.with_balance", "config.router_aux_loss_coef * ", "", "qwen3_moe-aux-loss"
    ),
    "load-balancing loss as a mean over the top k": Sabotage(
        f"{MOE}:load_balancing_loss", "mean(chosen.mean(0)) *", "mean(chosen.mean(0)) / k *", "granitemoe-aux-loss"
    ),
    "load-balancing loss of one layer only": Sabotage(
        f"{MOE}:load_balancing_loss", "torch.cat(router_logits)", "router_logits[0]", "qwen2_moe-aux-loss"
    ),
}
MODEL = {
    "gate and up swapped": Sabotage(
        f"{MAPPING}:packed_gate_up",
        '(layer + "gate_proj", layer + "up_proj")',
        '(layer + "up_proj", layer + "gate_proj")',
        "llama",
    ),
    "exact gelu for tanh": Sabotage(
        f"{CONFIG}:Config.activation",
        'kernel_activation("hidden_act", self.hidden_act, self.activations)',
        '"gelu"',
        "llama-gelu-tanh",
    ),
    "gemma: gelu read as exact gelu": Sabotage(
        "ligermodels.configs.text_models:GemmaConfig.activation", '"gelu_tanh" if', '"gelu" if', "gemma"
    ),
    "residual lost": Sabotage(f"{RMS_NORM}:added", "else x + residual", "else x", "llama"),
    "residual_multiplier of attention ignored": Sabotage(
        f"{BLOCK}:ScaledLayer.forward_block",
        "x * self.multiplier, residual)",
        "x, residual)",
        "granite-residual-multiplier",
    ),
    "residual_multiplier of the MLP ignored": Sabotage(
        f"{BLOCK}:ScaledLayer.forward_block", "return x * self.multiplier", "return x", "granite-residual-multiplier"
    ),
    "embedding_multiplier ignored": Sabotage(
        f"{FEATURES}:MultiplierConfig.embedding_scale",
        "self.embedding_multiplier",
        "1.0",
        "granite-embedding-multiplier",
    ),
    "logits_scaling ignored": Sabotage(
        f"{FEATURES}:MultiplierConfig.logit_scale", "1.0 / self.logits_scaling", "1.0", "granite-logits-scaling"
    ),
    "logits_scaling ignored in the loss": Sabotage(
        f"{DECODER}:CausalLM.logit_options",
        "self.config.logit_scale",
        "1.0",
        "granite-logits-scaling",
    ),
    "gemma: embeddings unscaled": Sabotage(f"{DECODER}:Decoder.scale", "self.embedding_scale == 1.0", "True", "gemma"),
    "labels not shifted": Sabotage(f"{DECODER}:next_tokens", "labels[:, 1:], (0, 1)", "labels, (0, 0)", "llama"),
    "padding row trained": Sabotage(
        f"{DECODER}:Decoder.forward",
        "self.embed_tokens(input_ids)",
        "torch.nn.functional.embedding(input_ids, self.embed_tokens.weight)",
        "llama-padding",
    ),
}
FAMILIES_OF_2025 = {
    "ministral3: queries not scaled": Sabotage(
        f"{ATTENTION_LAYER}:Attention.weighted_values", "positions.query_scale is not None", "False", "ministral3"
    ),
    "ministral3: scale grows at the wrong positions": Sabotage(
        f"{ROPE}:query_scale", "position_ids / scale.length", "(position_ids + 1) / scale.length", "ministral3"
    ),
    "ministral3: scale without beta": Sabotage(f"{ROPE}:query_scale", "scale.beta * ", "", "ministral3"),
    "mistral3: window of the text model lost": Sabotage(
        f"{FAMILIES}.mistral3:Mistral3.layer", "config.window(index)", "None", "mistral3-text-mistral"
    ),
    "seed_oss: no bias of q, k and v": Sabotage(
        f"{FAMILIES}.seed_oss:SeedOss.layer", "qkv_bias=config.attention_bias", "qkv_bias=False", "seed_oss"
    ),
    "exaone4: RoPE on full layers": Sabotage(
        f"{FAMILIES}.exaone4:Exaone4Config.has_rope", "not self.sliding_window or", "True or", "exaone4"
    ),
    "exaone4: no RoPE without a window": Sabotage(
        f"{FAMILIES}.exaone4:Exaone4Config.has_rope", "not self.sliding_window or ", "", "exaone4-no-window"
    ),
    "exaone4: windowed layers shifted": Sabotage(
        f"{FAMILIES}.exaone4:Exaone4Config.is_sliding", "(layer + 1)", "layer", "exaone4"
    ),
    "QK-norm without RoPE dropped": Sabotage(
        "ligermodels.layers.fused:qk_norm_then_rope", "q, k = q_norm(q), k_norm(k)", "pass", "exaone4"
    ),
    "hunyuan: queries not normed": Sabotage(
        f"{ATTENTION_LAYER}:RotatedQKNormAttention.split_and_rotate", "self.q_norm(q)", "q", "hunyuan_v1_dense"
    ),
    "hunyuan: alpha ignored": Sabotage(
        f"{FAMILIES}.hunyuan_v1_dense:stretched",
        "rope.rope_theta * stretch",
        "rope.rope_theta",
        "hunyuan_v1_dense-rope-alpha",
    ),
    "hunyuan: alpha without its exponent": Sabotage(
        f"{FAMILIES}.hunyuan_v1_dense:stretched",
        " ** (head_dim / (head_dim - 2))",
        "",
        "hunyuan_v1_dense-rope-alpha",
    ),
    "cohere2: RMSNorm for LayerNorm": Sabotage(
        "ligermodels.layers.norm:LayerNorm.forward",
        "layer_norm(x, self.weight, self.bias, self.eps)",
        "rms_norm(x, self.weight, self.eps)",
        "cohere2",
    ),
    "cohere2: branches one after the other": Sabotage(
        f"{BLOCK}:ParallelLayer.forward_block",
        "self.mlp(None, normed, None)",
        "self.mlp(None, attended, None)",
        "cohere2",
    ),
    "cohere2: RoPE not interleaved": Sabotage(
        f"{FAMILIES}.cohere2:Cohere2.layer", "interleaved=True", "interleaved=False", "cohere2"
    ),
    "cohere2: RoPE on full layers": Sabotage(
        f"{FAMILIES}.cohere2:Cohere2.layer", "== SLIDING_ATTENTION", "!= SLIDING_ATTENTION", "cohere2"
    ),
    "olmoe: weights renormalised": Sabotage(
        f"{FAMILIES}.olmoe:Olmoe.layer", "normalize=config.norm_topk_prob", "normalize=True", "olmoe"
    ),
    "correction bias not in the choice": Sabotage(
        SIGMOID, "is None else scores + bias", "is None else scores", "glm4_moe"
    ),
    "correction bias in the weights": Sabotage(SIGMOID, "scores.gather(", "(scores + bias).gather(", "glm4_moe"),
    "group mask dropped": Sabotage(SIGMOID, "top_groups < groups", "False", "glm4_moe"),
    "groups scored by their best expert": Sabotage(SIGMOID, "topk(2)", "topk(1)", "glm4_moe"),
    "sigmoid weights not normalised": Sabotage(SIGMOID, "if normalize:", "if False:", "glm4_moe"),
    "routed_scaling_factor ignored": Sabotage(SIGMOID, "weight * scale", "weight", "glm4_moe"),
    "glm4_moe: dense layers shifted": Sabotage(
        f"{FEATURES}:GroupedRoutingConfig.is_sparse", "layer >= self", "layer > self", "glm4_moe"
    ),
    "glm4_moe: shared expert gated": Sabotage(
        "ligermodels.layers.grouped_routing:GroupedRoutingLM.feed_forward",
        "shared_gate=False",
        "shared_gate=True",
        "glm4_moe",
    ),
}
GEMMA4_LAYERS = "ligermodels.layers.gemma"
GEMMA4_CONFIG = "ligermodels.configs.gemma4:Gemma4Config"
LAYER_INPUTS = f"{GEMMA4_LAYERS}:LayerInputDecoder.layer_inputs"
LAYER_INPUT_LAYER = f"{GEMMA4_LAYERS}:LayerInputLayer.forward_block"
GEMMA4 = {
    "values not normed": Sabotage(
        f"{GEMMA4_LAYERS}:NormedHeadsAttention.forward", "v = rms_norm(v, ", "_ = rms_norm(v, ", "gemma4_text"
    ),
    "values are normed keys": Sabotage(
        f"{GEMMA4_LAYERS}:NormedHeadsAttention.forward",
        "v = rms_norm(v, ",
        "v = rms_norm(k, ",
        "gemma4_text-keys-are-values",
    ),
    "scores scaled": Sabotage(
        f"{GEMMA4_LAYERS}:NormedHeadsAttention.forward", '"scale": self.scale', '"scale": 0.3', "gemma4_text"
    ),
    "queries of readers not normed": Sabotage(
        f"{GEMMA4_LAYERS}:ReadingAttention.forward",
        "self.q_norm(q.unflatten(-1, (self.num_heads, self.head_dim)))",
        "q.unflatten(-1, (self.num_heads, self.head_dim))",
        "gemma4_text",
    ),
    "keys of the first layer of a type": Sabotage(
        f"{GEMMA4_CONFIG}.is_read", "range(layer + 1, own)", "range(layer)", "gemma4_text"
    ),
    "keys are values in sliding layers too": Sabotage(
        f"{GEMMA4_CONFIG}.keys_are_values",
        " and self.layer_type(layer) == FULL_ATTENTION",
        "",
        "gemma4_text-keys-are-values",
    ),
    "key heads of full layers ignored": Sabotage(
        f"{GEMMA4_CONFIG}.key_value_heads",
        "self.keys_are_values(layer) and",
        "False and",
        "gemma4_text-keys-are-values",
    ),
    "last layer with a window": Sabotage(
        f"{GEMMA4_CONFIG}.layer_type", "layer == self.num_hidden_layers - 1", "False", "gemma4_text-last-layer-forced"
    ),
    "gemma4: pattern shifted": Sabotage(
        f"{GEMMA4_CONFIG}.is_sliding", "(layer + 1)", "layer", "gemma4_text-default-layer-types"
    ),
    "proportional RoPE on all pairs": Sabotage(f"{ROPE}:proportional_frequencies", "= 0.0", "*= 1.0", "gemma4_text"),
    "proportional RoPE with the exponents of its share": Sabotage(
        f"{ROPE}:proportional_frequencies",
        "default_frequencies(rope, rotary_dim, max_position_embeddings)",
        "default_frequencies(rope, rotary_dim, 0) ** 4",
        "gemma4_text",
    ),
    "per-layer embeddings unscaled": Sabotage(LAYER_INPUTS, "size**0.5", "1.0", "gemma4_text"),
    "projection of the embedding unscaled": Sabotage(
        LAYER_INPUTS, " * embeddings.shape[-1] ** -0.5", "", "gemma4_text"
    ),
    "per-layer inputs summed": Sabotage(LAYER_INPUTS, " * 2**-0.5", "", "gemma4_text-norm-eps"),
    "input of another layer": Sabotage(
        f"{DECODER}:Decoder.forward", "layer_inputs[index]", "layer_inputs[index - 1]", "gemma4_text"
    ),
    "layer_scalar on the branch alone": Sabotage(
        LAYER_INPUT_LAYER,
        "(x + residual) * self.layer_scalar.to(x.dtype)",
        "x * self.layer_scalar.to(x.dtype) + residual",
        "gemma4_text-no-layer-inputs",
    ),
    "layer_scalar ignored": Sabotage(LAYER_INPUT_LAYER, " * self.layer_scalar.to(x.dtype)", "", "gemma4_text"),
    "router reads what the experts read": Sabotage(
        f"{MOE}:MoE.forward", "if router.norms_input", "if False", "gemma4_text-moe"
    ),
    "router input unscaled": Sabotage(
        f"{GEMMA4_LAYERS}:NormedRouter.forward", " * x.shape[-1] ** -0.5", "", "gemma4_text-moe"
    ),
    "per_expert_scale ignored": Sabotage(
        f"{GEMMA4_LAYERS}:NormedRouter.choose", "weight * self.per_expert_weight[index]", "weight", "gemma4_text-moe"
    ),
    "MLP of readers not wide": Sabotage(f"{GEMMA4_CONFIG}.mlp_width", "2 if self", "1 if self", "gemma4_text-wide-mlp"),
}
LATENT = "ligermodels.layers.latent_attention"
LATENTS = {
    "rotated part of the queries first": Sabotage(
        f"{LATENT}:LatentAttention.rotate", "[q_nope, q_rope]", "[q_rope, q_nope]", "deepseek_v3"
    ),
    "rotation of the keys lost": Sabotage(
        f"{LATENT}:LatentAttention.rotate",
        "q_rope, k_rope = rotated",
        "k_rope = k_rope[:, :, None]\n    q_rope, _ = rotated",
        "deepseek_v3",
    ),
    "pairs of RoPE half-split": Sabotage(
        f"{LATENT}:LatentAttention.rotate", "0, self.interleaved", "0, False", "deepseek_v3"
    ),
    "pairs of RoPE always neighbours": Sabotage(
        f"{LATENT}:LatentAttention.rotate", "0, self.interleaved", "0, True", "deepseek_v3-rope-half-split"
    ),
    "values before keys in kv_b_proj": Sabotage(
        f"{LATENT}:LatentAttention.keys_and_values",
        "k_nope, v = heads.split([self.nope_size, self.value_size], -1)",
        "v, k_nope = heads.split([self.value_size, self.nope_size], -1)",
        "deepseek_v3",
    ),
    "mscale not in the scale": Sabotage(f"{ROPE}:score_factor", "** 2", "* 0 + 1", "deepseek_v3-rope-yarn"),
    "mscale once in the scale": Sabotage(f"{ROPE}:score_factor", " ** 2", "", "deepseek_v3-rope-yarn"),
    "mscale for mscale_all_dim": Sabotage(
        f"{ROPE}:score_factor",
        "yarn_mscale(rope.mscale_all_dim",
        "yarn_mscale(rope.mscale",
        "deepseek_v3-rope-yarn-mscale",
    ),
    "scale of the value's size": Sabotage(
        f"{LATENT}:LatentAttention.forward",
        "scale=self.scale, dropout",
        "scale=self.value_size**-0.5, dropout",
        "deepseek_v3",
    ),
    "latent of the keys not normed": Sabotage(
        f"{LATENT}:LatentAttention.forward",
        "norm_then_linear(PreNorm(self.kv_a_layernorm)",
        "norm_then_linear(None",
        "glm4_moe_lite",
    ),
    "latent of the queries not normed": Sabotage(
        f"{LATENT}:LatentAttention.forward",
        "norm_then_linear(PreNorm(self.q_a_layernorm)",
        "norm_then_linear(None",
        "glm4_moe_lite",
    ),
    "glm4_moe_lite: mlp_layer_types ignored": Sabotage(
        f"{FAMILIES}.glm4_moe_lite:Glm4MoeLiteConfig.is_sparse",
        "self.mlp_layer_types is None",
        "True",
        "glm4_moe_lite-layer-types",
    ),
}
DELTA = "ligermodels.layers.gated_delta"
RULE = "ligermodels.kernels.linear_attention.gated_delta_rule:gated_delta_rule_reference"
CONV = "ligermodels.kernels.linear_attention.causal_conv:causal_conv_reference"
STATES = {
    "decay grows": Sabotage(f"{DELTA}:GatedDeltaNet.forward", "g = -widen", "g = widen", "qwen3_5_text"),
    "dt_bias dropped": Sabotage(f"{DELTA}:GatedDeltaNet.forward", " + widen(self.dt_bias)", "", "qwen3_5_text"),
    "beta without its sigmoid": Sabotage(f"{DELTA}:GatedDeltaNet.forward", ".sigmoid()", "", "qwen3_5_text"),
    "a and b swapped": Sabotage(f"{DELTA}:GatedDeltaNet.forward", "qkv, z, b, a", "qkv, z, a, b", "qwen3_5_text"),
    "a and b swapped in a group": Sabotage(
        f"{DELTA}:GroupedGatedDeltaNet.split", "b, a = ba", "a, b = ba", "qwen3_next"
    ),
    "values and z swapped in a group": Sabotage(
        f"{DELTA}:GroupedGatedDeltaNet.split", "q, k, v, z = qkvz", "q, k, z, v = qkvz", "qwen3_next"
    ),
    "b and a not by key head": Sabotage(
        f"{DELTA}:GroupedGatedDeltaNet.split",
        "(heads, 2, group)).unbind(-2)",
        "(2, heads * group)).unbind(-2)",
        "qwen3_next",
    ),
    "value heads in turn": Sabotage(RULE, "repeat_interleave(group, 2)", "repeat(1, 1, group, 1)", "qwen3_5_text"),
    "error of the undecayed state": Sabotage(
        RULE, "_factor(state, qkv) * k", "_factor(state / decay[:, t, :, None, None], qkv) * k", "qwen3_5_text"
    ),
    "queries not scaled": Sabotage(RULE, "(q, key_size**-0.5)", "(q, 1.0)", "qwen3_5_text"),
    "keys not normalised": Sabotage(
        "ligermodels.kernels.linear_attention.gated_delta_rule:_unit_reference",
        "torch.rsqrt(",
        "torch.ones_like(",
        "qwen3_5_text",
    ),
    "convolution sees the next token": Sabotage(
        CONV, "torch.cat([past, x], 1)", "torch.cat([past, x], 1).roll(-1, 1)", "qwen3_5_text"
    ),
    "convolution without its activation": Sabotage(
        "ligermodels.layers.states:CausalConv.forward", "self.activation", "None", "qwen3_5_text"
    ),
    "gate before the norm": Sabotage(
        "ligermodels.kernels.norms.gated_rms_norm:gated_rms_norm_reference",
        "wide * gate if gate_first else wide",
        "wide * gate",
        "qwen3_5_text",
    ),
    "norm behind the rule with weight + 1": Sabotage(
        "ligermodels.kernels.norms.gated_rms_norm:gated_rms_norm_reference",
        "widen(weight)",
        "(1 + widen(weight))",
        "qwen3_5",
    ),
    "other norms without it": Sabotage(
        "ligermodels.kernels.norms.rms_norm:rms_norm_reference", " + offset", "", "qwen3_5_text"
    ),
    "output gate dropped": Sabotage(
        "ligermodels.kernels.attention.sigmoid_gate:sigmoid_gate_reference", " * widen(z).sigmoid()", "", "qwen3_5_text"
    ),
    "queries and gates as halves": Sabotage(
        "ligermodels.kernels.attention.qkv_heads:split_gated_heads",
        "(num_heads, 2)).unbind(3)",
        "(2, num_heads)).unbind(2)",
        "qwen3_5_text",
    ),
    "every layer_types ignored": Sabotage(
        "ligermodels.configs.hybrid:GatedDeltaConfig.is_linear", "is not None", "is False", "qwen3_5_text-layer-types"
    ),
    "interval shifted": Sabotage(
        "ligermodels.configs.hybrid:GatedDeltaConfig.is_linear", "(layer + 1)", "layer", "qwen3_5_text"
    ),
    "lfm2: gates swapped": Sabotage(
        "ligermodels.layers.states:ShortConv.forward", "b, c, u = projected", "c, b, u = projected", "lfm2"
    ),
    "lfm2: gated after the convolution": Sabotage(
        "ligermodels.layers.states:ShortConv.forward", "self.conv(b * u, ", "b * self.conv(u, ", "lfm2"
    ),
    "lfm2: size of the feed-forward layer not adjusted": Sabotage(
        f"{FAMILIES}.lfm2:Lfm2Config.feed_forward_size",
        "int(2 * self.intermediate_size / 3)",
        "self.intermediate_size",
        "lfm2",
    ),
    "lfm2: w1 and w3 swapped": Sabotage(
        f"{MAPPING}:packed_short_conv_layers", '(mlp + "w1", mlp + "w3")', '(mlp + "w3", mlp + "w1")', "lfm2"
    ),
    "lfm2: norms swapped": Sabotage(
        f"{MAPPING}:packed_short_conv_layers",
        'operator_norm": "input_layernorm"',
        'ffn_norm": "input_layernorm", "operator_norm": "post_attention_layernorm"',
        "lfm2",
    ),
    "lfm2: full_attn_idxs ignored": Sabotage(
        "ligermodels.configs.hybrid:conv_layers", "layer in attention", "layer == 0", "lfm2"
    ),
    "lfm2_moe: dense layers shifted": Sabotage(
        f"{FAMILIES}.lfm2_moe:Lfm2Moe.layer", "index < config", "index <= config", "lfm2_moe"
    ),
    "qwen3_5_moe: weights not normalised": Sabotage(
        f"{FAMILIES}.qwen3_5_moe:Qwen3_5MoeText.layer", "normalize=True", "normalize=False", "qwen3_5_moe"
    ),
}
GLU = "ligermodels.kernels.moe.expert_product:expert_glu_reference"
GPT_OSS = {
    "sinks dropped": Sabotage(
        f"{ATTENTION_LAYER}:Attention.weighted_values", "if self.sinks is None else", "if True else", "gpt_oss"
    ),
    "sinks of other heads": Sabotage(f"{ATTENTION}:masked_attention", "sinks.to(", "sinks.flip(0).to(", "gpt_oss"),
    "gate not clamped": Sabotage(GLU, "gate.clamp(max=GLU_LIMIT)", "gate", "gpt_oss"),
    "up not clamped": Sabotage(GLU, "up.clamp(-GLU_LIMIT, GLU_LIMIT)", "up", "gpt_oss"),
    "up clamped from one side": Sabotage(GLU, "up.clamp(-GLU_LIMIT, GLU_LIMIT)", "up.clamp(max=GLU_LIMIT)", "gpt_oss"),
    "up without its 1": Sabotage(GLU, "(1.0 + up)", "up", "gpt_oss"),
    "sigmoid without its factor": Sabotage(
        GLU, "torch.sigmoid(GLU_SHARPNESS * gate)", "torch.sigmoid(gate)", "gpt_oss"
    ),
    "bias of gate and up dropped": Sabotage(
        EXPERTS_REFERENCE, "gate_up_update, gate_up_bias", "gate_up_update, None", "gpt_oss"
    ),
    "bias of the down projection dropped": Sabotage(
        EXPERTS_REFERENCE, "down_update, down_bias", "down_update, None", "gpt_oss"
    ),
    "bias of the router dropped": Sabotage(f"{MOE}:Router.forward", "self.weight, self.bias", "self.weight", "gpt_oss"),
    "gpt_oss: odd layers windowed": Sabotage(f"{FAMILIES}.gpt_oss:GptOssConfig.is_sliding", "== 0", "== 1", "gpt_oss"),
    "gpt_oss: no YaRN by default": Sabotage(
        f"{CONFIG}:Config.read_ropes", "cls.default_rope_scaling is not None", "False", "gpt_oss-rope-default"
    ),
    "gpt_oss: gate and up in blocks": Sabotage(
        f"{FAMILIES}.gpt_oss:GptOss.weight_rules", "(inner, 2)), (0, 3, 2, 1)", "(2, inner)), (0, 2, 3, 1)", "gpt_oss"
    ),
    "gpt_oss: biases of gate and up in blocks": Sabotage(
        f"{FAMILIES}.gpt_oss:GptOss.rules", 'permuted(GATE_UP + "_bias", gates, (0, 2, 1)), ', "", "gpt_oss"
    ),
    "gpt_oss: truncated YaRN": Sabotage(f"{ROPE}:yarn_frequencies", "if rope.truncate", "if True", "gpt_oss"),
}
MAMBA = "ligermodels.layers.mamba2:Mamba2.forward"
SCAN = "ligermodels.kernels.linear_attention.mamba2_scan:mamba2_scan_reference"
HYBRID = f"{FAMILIES}.granitemoehybrid:GraniteMoeHybrid"
MAMBA2 = {
    "state grows": Sabotage(MAMBA, "a = -widen", "a = widen", "granitemoehybrid-dense"),
    "dt_bias of Mamba-2 dropped": Sabotage(MAMBA, " + widen(self.dt_bias)", "", "granitemoehybrid-dense"),
    "step size without its softplus": Sabotage(MAMBA, "F.softplus(", "F.relu(", "granitemoehybrid-dense"),
    "step size not clamped": Sabotage(MAMBA, ".clamp(*self.limit)", "", "granitemoehybrid-time-step-limit"),
    "dt before the rest": Sabotage(MAMBA, "projected.split", "projected.roll(6, -1).split", "granitemoehybrid-dense"),
    "B and C swapped": Sabotage(SCAN, "x, b, c = (", "x, c, b = (", "granitemoehybrid-dense"),
    "groups in turn": Sabotage(
        SCAN,
        "y.repeat_interleave(shape.heads // groups, 2)",
        "y.repeat(1, 1, 6 // groups, 1)",
        "granitemoehybrid-groups",
    ),
    "input not scaled by the step": Sabotage(SCAN, "delta[..., None] * x", "x", "granitemoehybrid-dense"),
    "skip dropped": Sabotage(SCAN, "d[:, None] * x", "0 * d[:, None] * x", "granitemoehybrid-dense"),
    "gate behind the norm": Sabotage(
        "ligermodels.kernels.norms.gated_rms_norm:gated_rms_norm_reference",
        "wide = wide * gate if gate_first",
        "wide, gate_first = wide, False  #",
        "granitemoehybrid-dense",
    ),
    "norm over all groups": Sabotage(
        "ligermodels.layers.mamba2:GroupedGatedNorm.forward", "self.groups == 1", "True", "granitemoehybrid-groups"
    ),
    "bias of the convolution dropped": Sabotage(
        "ligermodels.layers.states:CausalConv.forward", "self.bias", "None", "granitemoehybrid-dense"
    ),
    "granitemoehybrid: attention in the layers of Mamba-2": Sabotage(
        "ligermodels.configs.hybrid:Mamba2Config.is_mamba", "in (MAMBA", "not in (MAMBA", "granitemoehybrid-dense"
    ),
    "granitemoehybrid: attention with positions": Sabotage(
        "ligermodels.configs.hybrid:Mamba2Config.attention_rope", "if self", "if not self", "granitemoehybrid-nope"
    ),
    "granitemoehybrid: attention without positions": Sabotage(
        "ligermodels.configs.hybrid:Mamba2Config.attention_rope", "if self", "if not self", "granitemoehybrid-rope"
    ),
    "granitemoehybrid: attention_multiplier ignored": Sabotage(
        f"{HYBRID}.attention", "scale=scale", "scale=None", "granitemoehybrid-all-attention"
    ),
    "granitemoehybrid: shared expert with a gate": Sabotage(
        f"{HYBRID}.layer", "shared_gate=False", "shared_gate=True", "granitemoehybrid"
    ),
    "granitemoehybrid: residual_multiplier ignored": Sabotage(
        f"{HYBRID}.layer", "experts, config.residual_multiplier", "experts, 1.0", "granitemoehybrid"
    ),
    "granitemoehybrid: intermediate_size of the routed experts for the shared one": Sabotage(
        f"{HYBRID}.layer",
        "intermediate_size=shared), ",
        "intermediate_size=config.intermediate_size), ",
        "granitemoehybrid-dense",
    ),
}
BREAKS = (
    MAMBA2
    | GEMMA4
    | STATES
    | LATENTS
    | GPT_OSS
    | FAMILIES_OF_2025
    | WINDOWS
    | SCORES
    | NORMS
    | ROTATIONS
    | EXPERTS
    | MODEL
)


@pytest.mark.parametrize("name", sorted(BREAKS, key=lambda name: BREAKS[name].case))
def test_a_break_makes_its_parity_case_fail(name, monkeypatch):
    """The numbers differ, or the checkpoint no longer fits the model."""
    sabotage = BREAKS[name]
    sabotage.apply(monkeypatch)
    with pytest.raises((AssertionError, InputError)):
        check_parity(sabotage.case, CPU)


CHUNK_BORDERS = {  # name -> (the scan, its code, the broken code)
    "state not decayed by a chunk": ("forward_scan", "tl.exp(last) * state", "state"),
    "gradient of the state not decayed by a chunk": ("backward_scan", "tl.exp(last) * dstate", "dstate"),
}


@pytest.mark.usefixtures("kernels", "poisoned")
@pytest.mark.parametrize("name", CHUNK_BORDERS)
def test_a_break_at_the_border_of_chunks_makes_the_test_of_the_rule_fail(name, tmp_path, monkeypatch):
    """Of a document of two chunks."""
    scan, old, new = CHUNK_BORDERS[name]
    broken = broken_copy(delta_states, old, new, tmp_path)
    monkeypatch.setattr(gated_delta_rule, scan, getattr(broken, scan))
    with pytest.raises(AssertionError):
        check_rule(draw(1, 66, 1), torch.float32)
