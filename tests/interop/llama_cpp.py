"""Converts exports of every family with llama.cpp's script and compares the GGUF files with the models.

    python -m tests.interop.llama_cpp LLAMA_CPP [FAMILY ...]

LLAMA_CPP is a checkout of llama.cpp. Not a test of the suite: besides the checkout it needs `gguf`, `sentencepiece` and
`protobuf`, which the script imports; with llama-cpp-python installed, its logits are compared too.

The script recognises a byte-level BPE by the hash of a text that it encodes, so it refuses every tokenizer that it was
not made for, as are those of new models. Here that function is replaced by one that returns "qwen2", which is how the
tokenizers of new models split words. Families whose script reads only SentencePiece get a tokenizer.model.

Compared: the values of all tensors, in both directions, with those of the export; sizes, RoPE and norm settings; logits
of 32 tokens, and of more than the sliding window.
"""

import argparse
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import ligermodels
from ligermodels.configs.rope import FULL_ATTENTION
from ligermodels.layers.decoder import CausalLM
from ligermodels.training.data.embedded_stories import vocabulary_texts
from ligermodels.training.data.run_tokenizer import save_tokenizer
from tests.interop.folders import VOCABULARY, export_with_tokenizer, new_tokenizer, tiny_model

SENTENCEPIECE_ONLY = ("ernie4_5", "gemma", "gemma2", "phi3")
NEEDS_USER_TOKEN = ("glm", "glm4")  # the script looks up <|user|> as the end of a turn
LENGTHS = (32, 200)  # tokens; the tiny presets have windows of 128
# llama.cpp knows one pattern of Gemma 3's windows and one attention scale, those of the published models.
GEMMA3 = {
    "sliding_window_pattern": 6, "num_hidden_layers": 7, "sliding_window": 128, "head_dim": 32,
    "query_pre_attn_scalar": 32,
}  # fmt: skip
AS_PUBLISHED = {"gemma3": GEMMA3, "gemma3_text": GEMMA3}
CONVERT = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "f32"]
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
convert_hf_to_gguf.main()
"""
# Norms that add 1 to their weight, which the GGUF file stores with the 1.
UNIT_OFFSET = ("gemma", "gemma2", "gemma3", "gemma3_text")
# Families whose query and key rows the script reorders from halves to interleaved pairs.
INTERLEAVED = ("granite", "granitemoe", "llama", "mistral", "mixtral", "smollm3")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama_cpp", type=Path, help="a checkout of llama.cpp")
    parser.add_argument("families", nargs="*", default=ligermodels.list_architectures())
    arguments = parser.parse_args()
    for family in arguments.families:
        with TemporaryDirectory() as temporary:
            print(f"{family:12}", "; ".join(report(family, Path(temporary), arguments.llama_cpp)), flush=True)


def report(family: str, temporary: Path, llama_cpp: Path) -> Iterator[str]:
    """What was found for a family, one phrase each."""
    model = tiny_model(family, **AS_PUBLISHED.get(family, {}))
    folder, file = temporary / "model", temporary / "model.gguf"  # a name with "phi3" promises Phi-3's special tokens
    export_with_tokenizer(model, folder, also=lambda path: write_tokenizer(family, path))
    command = [sys.executable, "-c", CONVERT, llama_cpp, folder, file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        yield f"not converted: {done.stderr.strip().splitlines()[-1]}"
        return
    yield tensor_differences(family, model, folder, file)
    yield field_differences(model, file)
    yield from logit_errors(model, file)


def write_tokenizer(family: str, folder: Path) -> None:
    """The tokenizer files that the script reads for this family."""
    if family in SENTENCEPIECE_ONLY:
        from sentencepiece import SentencePieceTrainer

        trained = io.BytesIO()
        SentencePieceTrainer.train(
            sentence_iterator=vocabulary_texts(), model_writer=trained, vocab_size=VOCABULARY, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        (folder / "tokenizer.model").write_bytes(trained.getvalue())
        return
    save_tokenizer(new_tokenizer(), folder)
    if family in NEEDS_USER_TOKEN:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        end = content["added_tokens"][-1]
        content["added_tokens"].append(end | {"content": "<|user|>", "id": VOCABULARY - 1})
        vocabulary = content["model"]["vocab"]
        last = next(token for token, index in vocabulary.items() if index == VOCABULARY - 1)
        content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != last]
        content["model"]["vocab"] = {token: index for token, index in vocabulary.items() if token != last}
        file.write_text(json.dumps(content))


def tensor_differences(family: str, model: CausalLM, folder: Path, file: Path) -> str:
    """Compares the tensors of the GGUF file with those of the export, by name and value."""
    import gguf

    reader = gguf.GGUFReader(file)
    architecture = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == field_of(reader, "general.architecture")
    )
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    expected = {}
    for name, tensor in stacked(load_file(folder / "model.safetensors")).items():
        if name.startswith(("vision_tower.", "multi_modal_projector.")):
            continue  # in a file of their own (--mmproj)
        for part, values in parts(family, name.removeprefix("language_model."), tensor, model):
            base, _, kind = part.rpartition(".")
            expected[f"{names.get_name(base) or base}.{kind}"] = values
    if model.config.tie_word_embeddings:
        expected.pop("output.weight", None)
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    wrong = [name for name in expected.keys() & found.keys() if not torch.equal(expected[name].float(), found[name])]
    odd = sorted((expected.keys() ^ found.keys()) | set(wrong))
    return f"{len(expected) - len(wrong)} of {len(found)} tensors equal" + (f", not {', '.join(odd)}" if odd else "")


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with those of a layer's experts stacked."""
    result = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    experts: dict[str, dict[int, Tensor]] = {}
    for name in tensors.keys() - result.keys():
        before, number, after = re.split(r"\.experts\.(\d+)\.", name)
        experts.setdefault(f"{before}.experts.{after}", {})[int(number)] = tensors[name]
    return result | {name: torch.stack([group[i] for i in sorted(group)]) for name, group in experts.items()}


def parts(family: str, name: str, tensor: Tensor, model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """What the script makes of one tensor."""
    config = model.config
    if family in INTERLEAVED and re.search(r"\.(q|k)_proj\.", name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    if family in UNIT_OFFSET and name.endswith("norm.weight"):
        tensor = tensor + 1
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = tensor.chunk(2, dim=1)
        layer = name.split(".")[2]
        yield f"blk.{layer}.ffn_gate_exps.weight", gate
        yield f"blk.{layer}.ffn_up_exps.weight", up
        return
    yield re.sub(r"^model\.(layers\.\d+)\.block_sparse_moe\.experts", r"\1.feed_forward.experts", name), tensor


def field_of(reader, name: str):
    """The value of a field of a GGUF file; None if it has none."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def field_differences(model: CausalLM, file: Path) -> str:
    """Compares sizes and settings. A field that the file does not have is not compared."""
    import gguf

    reader, config = gguf.GGUFReader(file), model.config
    prefix = field_of(reader, "general.architecture")
    wanted = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.ropes[FULL_ATTENTION].rope_theta,
        "attention.sliding_window": getattr(config, "sliding_window", None) or 0,
    }
    found = {name: field_of(reader, f"{prefix}.{name}") for name in wanted}
    wrong = [
        f"{name} {found[name]} for {value}"
        for name, value in wanted.items()
        if found[name] is not None and not np.isclose(found[name], value, rtol=1e-6, atol=0)
    ]
    return f"wrong fields: {', '.join(wrong)}" if wrong else "fields equal"


def logit_errors(model: CausalLM, file: Path) -> Iterator[str]:
    """The relative error of llama.cpp's logits, in the Frobenius norm, for each of LENGTHS."""
    try:
        from llama_cpp import Llama
    except ImportError:
        yield "logits not compared: llama-cpp-python is not installed"
        return
    try:
        reader = Llama(str(file), n_ctx=512, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
    except ValueError as error:
        yield f"not loaded: {error}"
        return
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model(ids[None]).logits[0].numpy()
        reader.reset()
        reader.eval(ids.tolist())
        error = np.linalg.norm(reader.scores[:length] - expected) / np.linalg.norm(expected)
        yield f"logits of {length} tokens: {error:.1e}"


if __name__ == "__main__":
    main()
