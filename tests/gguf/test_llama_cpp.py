"""Files that are written here, run by llama.cpp itself: token ids, log-probabilities, chats. Needs xllamacpp."""

import json
import unicodedata
import urllib.request

import pytest
import torch

from ligermodels.hub.models import load, load_tokenizer
from tests.gguf.files import FAMILIES, family_model, write_model
from tests.gguf.test_tokenizer import TEXTS
from tests.interop.folders import tiny_model

xllamacpp = pytest.importorskip("xllamacpp")

GELU_TABLE = ("gemma", "gemma2", "gemma3_text")  # whose GELU llama.cpp looks up in fp16
# Of llama.cpp's fp32 sums in another order, over a few layers; of the table; of activations, which it rounds to 8 bits
# for weights in bits.
FP32, FP16_GELU, IN_BITS = 1e-6, 2e-4, 1e-2
CONTEXT = 256  # what Phi-3's tiny preset is trained for: llama.cpp takes LongRoPE's long factors for any longer context


class LlamaCpp:
    """A server of llama.cpp in this process, that computes in fp32."""

    def __init__(self, file):
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_gpu_layers, params.port = str(file), CONTEXT, 0, 0
        params.warmup, params.fit_params, params.n_parallel, params.verbosity = False, False, 1, -1
        params.cpuparams.n_threads = 1
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        self.server = xllamacpp.Server(params)

    def ask(self, path, **data):
        content, headers = json.dumps(data).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.server.listening_address + path, content, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def encode(self, text):
        return self.ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def next_token_log_probabilities(self, ids):
        options = {"n_predict": 1, "n_probs": 10_000, "temperature": -1, "cache_prompt": False}
        answer = self.ask("/completion", prompt=ids, **options)
        found = answer.get("completion_probabilities", [{"top_logprobs": []}])  # absent if a text ends here
        return {x["id"]: x["logprob"] for x in found[0]["top_logprobs"]}


def relative_error(llama_cpp, model, ids):
    """Of the log-probabilities behind these tokens, the last of which is replaced if a text would end."""
    while not (found := llama_cpp.next_token_log_probabilities(ids)):
        ids = [*ids[:-1], ids[-1] + 1]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    values = torch.tensor([found[index] for index in range(len(expected))])
    return float((values - expected).norm() / expected.norm())


def as_llama_cpp(family):
    """The model that llama.cpp computes: it rounds the bounds of YaRN's ramp, which gpt-oss does not."""
    if family != "gpt_oss":
        return family_model(family)
    scaling = FAMILIES[family]["rope_scaling"] | {"truncate": True}
    return tiny_model(family, **(FAMILIES[family] | {"rope_scaling": scaling}))


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_what_the_model_computes(tmp_path, family):
    llama_cpp, model = LlamaCpp(write_model(family_model(family), tmp_path)), as_llama_cpp(family)
    generator = torch.Generator().manual_seed(0)
    for length in (1, 12):  # less than the windows, of which llama.cpp does not know Mistral's
        ids = torch.randint(3, 1000, (length,), generator=generator).tolist()
        assert relative_error(llama_cpp, model, ids) < (FP16_GELU if family in GELU_TABLE else FP32), length
    tokenizer = load_tokenizer(tmp_path / "model.gguf")
    texts = [text for text in TEXTS if unicodedata.is_normalized("NFC", text)]  # llama.cpp normalises nothing
    assert [llama_cpp.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("gguf_type", ["bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "mxfp4"])
def test_llama_cpp_decodes_each_type_as_it_is_decoded_here(tmp_path, gguf_type):
    file = write_model(family_model("mixtral"), tmp_path, gguf_type)
    llama_cpp, model = LlamaCpp(file), load(file, dtype="float32")
    assert relative_error(llama_cpp, model, list(range(100, 132))) < IN_BITS


def test_llama_cpp_answers_a_chat_with_the_files_template(tmp_path):
    file = write_model(family_model("qwen3"), tmp_path)
    messages = [{"role": "user", "content": "Hi"}]
    answer = LlamaCpp(file).ask("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0)
    tokenizer = load_tokenizer(file)
    prompt = tokenizer.encode(tokenizer.render_chat_template(messages, add_generation_prompt=True))
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 4 or answer["choices"][0]["finish_reason"] == "stop"
