"""LoRA on conversations of your own, from Python: train an adapter, look at its metrics, chat with it.

    python examples/lora_on_your_data.py --model Qwen/Qwen3-8B --data chats.jsonl
    python examples/lora_on_your_data.py                       a tiny model and 60 small chats, on a CPU in seconds

A line of the data: {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
"""

import argparse
import json
from pathlib import Path

import ligermodels
from ligermodels.training import TrainConfig, train

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a Hub id or a folder; without it, a tiny model is made first")
parser.add_argument("--data", default="chats.jsonl")
parser.add_argument("--epochs", type=float, default=3)
parser.add_argument("--output", type=Path, default=Path("runs/lora"))
args = parser.parse_args()

if not args.model:  # stands in for a pretrained model: a tiny one, trained for a moment on the embedded conversations
    pretrained = train(TrainConfig(model="qwen2", data="chats", steps=10, eval_every=10, output="runs/pretrained"))
    args.model = str(pretrained.exported)
    turns = [(f"What is {n} + {n}?", f"{n} + {n} = {2 * n}.") for n in range(60)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in turns]
    Path(args.data).write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

# Only what the assistant says is learned; sequences are packed; the base model stays as it is. Precision, sequence
# length and batch fit the data and the device.
config = TrainConfig(
    model=args.model, data=args.data, epochs=args.epochs, output=args.output, lora_rank=16, lora_export="adapter",
    lora_targets=["q_proj", "k_proj", "v_proj", "o_proj"],
)  # fmt: skip
result = train(config)
losses = [record["validation_loss"] for record in result.metrics if "validation_loss" in record]
print(f"validation loss {losses[0]:.3f} before, {losses[-1]:.3f} after; the adapter is in {result.exported}")

tokenizer = ligermodels.load_tokenizer(args.model)
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 7 + 7?"}], add_generation_prompt=True)
answer = ligermodels.generate(result.model.eval(), [prompt], max_new_tokens=16)[0]
print(tokenizer.decode(answer))
