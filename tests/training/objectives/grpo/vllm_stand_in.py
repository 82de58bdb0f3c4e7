"""A module with the part of vLLM's interface that `--sampler vllm` uses, which samples with this package's models.

An engine refuses what vLLM would: sampling while it sleeps or without weights, and names that it does not know. Like
vLLM's, its weights are forgotten in a sleep of level 2; a prompt's cache survives a change of the weights until
`reset_prefix_cache`.
"""

from types import ModuleType, SimpleNamespace

import torch

import ligermodels
from ligermodels.weights.exporting import hub_weights


class SamplingParams:
    def __init__(self, *, n, temperature, max_tokens, logprobs, ignore_eos, stop_token_ids, detokenize):
        assert logprobs == 0 and ignore_eos and not detokenize
        self.n, self.temperature, self.max_tokens, self.stops = n, temperature, max_tokens, set(stop_token_ids)


class TheirModel:
    """What `apply_model` hands over."""

    def __init__(self, model):
        self.model, self.tensors = model, {}

    def load_weights(self, weights):
        for name, tensor in weights:
            assert tensor.dtype == self.model.dtype, name
            self.tensors[name] = tensor.clone()
        known = dict(hub_weights(self.model, self.model.dtype))
        assert {n: x.shape for n, x in self.tensors.items()} == {n: x.shape for n, x in known.items()}
        return set(self.tensors)


class LLM:
    """calls: what was called, in order, of all engines."""

    calls: list[str] = []  # noqa: RUF012  # shared on purpose

    def __init__(self, *, model, dtype, max_model_len, max_num_seqs, kv_cache_memory_bytes, seed, **settings):
        assert settings == {
            "skip_tokenizer_init": True, "load_format": "dummy", "enable_sleep_mode": True, "disable_log_stats": True,
            "logprobs_mode": "processed_logprobs", "distributed_executor_backend": "external_launcher",
        }  # fmt: skip
        torch.manual_seed(seed)  # as vLLM's workers do
        self.limits = max_model_len, max_num_seqs, kv_cache_memory_bytes
        self.theirs = TheirModel(ligermodels.create(model, device="meta").to(getattr(torch, dtype)))
        self.folder, self.awake, self.cached = model, {"weights", "kv_cache"}, None
        self.calls.append("start")

    def sleep(self, level):
        assert level == 2
        self.awake.clear()
        self.theirs.tensors.clear()
        self.calls.append("sleep")

    def wake_up(self, tags):
        self.awake.update(tags)
        self.calls.append("wake " + " ".join(tags))

    def apply_model(self, function):
        assert "weights" in self.awake
        self.calls.append("load")
        return [function(self.theirs)]

    def reset_prefix_cache(self):
        self.cached = None
        self.calls.append("reset")

    def generate(self, prompts, *, sampling_params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"} and self.theirs.tensors and not use_tqdm
        self.calls.append("generate")
        self.cached = self.cached or self.with_weights()
        return [self.complete(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def with_weights(self):
        """The model with the weights that were pushed."""
        model = self.theirs.model.to_empty(device="cpu").eval()
        rules = ligermodels.weights.mapping.plan_pieces(
            {name: x.shape for name, x in model.stored_tensors().items()}, model.weight_rules()
        )
        values = model.stored_tensors()
        with torch.no_grad():
            for piece in rules:
                values[piece.parameter][piece.index].copy_(self.theirs.tensors[piece.tensor].reshape(piece.box_shape))
        return model

    @torch.no_grad()
    def complete(self, ids, params):
        assert len(ids) + params.max_tokens <= self.limits[0]
        outputs = []
        for _ in range(params.n):
            tokens, logprobs = [], []
            while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stops):
                logits = self.cached(torch.tensor([[*ids, *tokens]])).logits[0, -1].float()
                scores = (logits / (params.temperature or 1.0)).log_softmax(-1)
                token = int(scores.exp().multinomial(1) if params.temperature else scores.argmax())
                tokens.append(token)
                logprobs.append({token: SimpleNamespace(logprob=float(scores[token]))})
            outputs.append(SimpleNamespace(token_ids=tokens, logprobs=logprobs))
        return SimpleNamespace(outputs=outputs)


def make_module():
    module = ModuleType("vllm")
    module.__file__, module.LLM, module.SamplingParams = __file__, type("LLM", (LLM,), {"calls": []}), SamplingParams
    return module
