"""Train a tiny mixture of experts on the bundled text, for tests that need trained experts.

    python training/mixture.py OUT            # write a transformers folder; takes a few minutes on one core

The model has four layers of width 64. The first has a dense block. The others have one shared expert and eight routed
experts, two of which are chosen per token. Everything is seeded. transformers' auxiliary loss balances the router.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

import memlens

SEED, VOCABULARY, LENGTH, BATCH = 2021, 1024, 64, 16
CORPUS = Path(memlens.__file__).parent / "bundled" / "prose"


def read_text() -> str:
    """Return the text of all bundled articles."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(CORPUS.glob("*.txt")))


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the text."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>"], show_progress=False)
    raw.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>")


def make_network() -> Qwen2MoeForCausalLM:
    """Return a new network with seeded weights."""
    torch.manual_seed(SEED)
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=None,
    )
    return Qwen2MoeForCausalLM._from_config(config, experts_implementation="eager")


def train(network: Qwen2MoeForCausalLM, tokens: torch.Tensor, steps: int) -> float:
    """Train with AdamW, warm-up and linear decay. Returns the mean loss of the last 50 steps."""
    draw = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 50, max(1 - n / steps, 0.02)))
    losses, began = [], time.monotonic()
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - LENGTH, (BATCH,), generator=draw)
        batch = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        loss = network(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {sum(losses[-100:]) / 100:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return sum(losses[-50:]) / 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same bits for any number of cores
    text = read_text()
    tokenizer, network = make_tokenizer(text), make_network()
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    loss = train(network, tokens, options.steps)
    network.config.output_router_logits = False
    network.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    # float16 is for storage only; without this, transformers would also compute in float16
    config = json.loads((options.out / "config.json").read_text(encoding="utf-8")) | {"dtype": "float32"}
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(one.numel() for one in network.parameters()):,} parameters, loss {loss:.3f} -> {options.out}")


if __name__ == "__main__":
    main()
