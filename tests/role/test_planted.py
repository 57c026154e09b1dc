"""Models with one memory planted for each role: `memlens roles` finds it there, from the scan to the table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import memlens
from memlens.role.effects import _find_suppressing
from memlens.role.weights import ValueReader
from memlens.testing import tiny_model, tiny_tokenizer

WORDS = [f"{a}{b}" for a in "klmnpst" for b in ("ar", "et", "in", "os")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    file = tmp_path / "text.txt"
    file.write_text("\n".join(" ".join(random.choice(WORDS, random.integers(3, 12))) + "." for _ in range(80)))
    return file


def roles_of(network: Any, text: Path, **options: Any) -> dict[str, list[str]]:
    """By memory, after a scan of the planted model."""
    tokenizer = tiny_tokenizer(adds_bos=bool(options))
    index = memlens.scan(
        network, text, out=text.parent / "index", tokenizer=tokenizer, unit="line", workers=1, **options
    )
    memlens.roles(index, model=memlens.load(network, tokenizer=tokenizer))
    return {f"L{row['layer']}N{row['memory']}": row["roles"] for row in index.table("roles").to_pylist()}


def heaviest(scores: Tensor) -> Tensor:
    """[d]: the direction whose scores [tokens, d] have the heaviest tail, above, by the fixed point of FastICA."""
    u, lengths, v = torch.linalg.svd(scores, full_matrices=False)
    kept = lengths > 1e-6 * lengths[0]
    white, back = u[:, kept] * len(u) ** 0.5, v[kept].T / lengths[kept]
    w = white.T / white.T.norm(dim=0)  # one start for each token
    for _ in range(100):
        w = white.T @ (white @ w) ** 3 / len(u) - 3 * w
        w = w / w.norm(dim=0)
    found: Tensor = back @ w[:, ((white @ w) ** 4).mean(0).argmax()]
    return found * ((scores @ found) ** 3).mean().sign() / found.norm()


def test_roles_of_values_are_found_where_they_were_planted(text: Path) -> None:
    network = tiny_model("gpt2", activation_function="relu")
    encoded = tiny_tokenizer()(text.read_text().splitlines())["input_ids"]
    counts = np.bincount([token for ids in encoded for token in ids], minlength=network.config.vocab_size)
    frequency = torch.from_numpy(np.log(np.maximum(counts, 1)))
    along = torch.tensor([1.0, -1.0]).repeat(network.config.n_embd // 2) / network.config.n_embd**0.5
    with torch.no_grad():  # without it no direction of 16 numbers follows the frequency of tokens
        embedding = network.transformer.wte.weight
        embedding += 3 * embedding.std() * torch.outer((frequency - frequency.mean()) / frequency.std(), along).float()
    model = memlens.load(network, tokenizer=tiny_tokenizer())
    lens = ValueReader(model, 1, model.lens.readings[0], counts)
    scores = torch.cat([part for _, part in lens._embeddings()]) @ lens.fold.T  # [tokens, d]
    strongest = torch.linalg.eigh(scores.T @ scores).eigenvectors[:, -1]
    planted = {
        "entropy": 9 * lens.weak[:, 0], "token-frequency": lens.frequent / lens.frequent.norm(),
        "prediction": heaviest(scores), "suppression": -heaviest(scores), "partition": strongest,
    }  # fmt: skip
    with torch.no_grad():
        for place, value in enumerate(planted.values()):
            network.transformer.h[1].mlp.c_proj.weight[place] = value.float()
        network.transformer.h[1].mlp.c_fc.weight[:, 7] = 0.0
        network.transformer.h[1].mlp.c_fc.bias[7] = -1.0
    found = roles_of(network, text)
    for place, role in enumerate(planted):
        assert role in found[f"L1N{place}"], (role, found[f"L1N{place}"])
    assert found["L1N7"] == ["dead"]
    others = [own for name, own in found.items() if name not in {*(f"L1N{place}" for place in range(5)), "L1N7"}]
    assert sum(bool(set(own) & planted.keys()) for own in others) <= 2  # random values


def with_token_memory() -> tuple[Any, int]:
    """A model whose L0N0 fires on one token alone, and the token: no attention nor positions before it in layer 0."""
    network = tiny_model("gpt2", activation_function="relu")
    body = network.transformer
    token = tiny_tokenizer().encode(" kar")[-1]
    with torch.no_grad():
        body.wpe.weight.zero_()
        for part in (body.h[0].attn.c_proj.weight, body.h[0].attn.c_proj.bias):
            part.zero_()
        reads = body.h[0].ln_2(body.wte.weight)
        dots = (reads @ reads[token]).sort().values
        body.h[0].mlp.c_fc.weight[:, 0] = reads[token]
        body.h[0].mlp.c_fc.bias[0] = -(dots[-1] + dots[-2]) / 2
    return network, token


def test_a_memory_that_fires_on_one_token_alone_is_found(text: Path) -> None:
    network, _ = with_token_memory()
    assert "token" in roles_of(network, text)["L0N0"]


def test_a_memory_that_removes_its_token_is_asked_after_its_best_trigger_with_it(
    text: Path, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, token = with_token_memory()
    with torch.no_grad():
        network.transformer.h[0].mlp.c_proj.weight[0] = -5 * network.transformer.wte.weight[token]
    network.save_pretrained(text.parent / "model")
    tiny_tokenizer().save_pretrained(text.parent / "model")
    index = memlens.scan(text.parent / "model", text, out=text.parent / "index", workers=1)
    memlens.roles(memlens.values(index))
    group, prefixes = _find_suppressing(index, np.random.default_rng(0))
    sentences = {row["sentence"]: row["tokens"] for row in index.table("corpus").to_pylist()}
    top = [row for row in index.table("triggers").to_pylist() if row["end"] == "top"]
    naive = []
    for role, value in zip(index.table("roles").to_pylist(), index.table("values").to_pylist(), strict=True):
        if "token" in role["roles"] and role["token"] in value["bottom_tokens"]:
            key = role["layer"], role["memory"]
            own = sorted((row for row in top if (row["layer"], row["memory"]) == key), key=lambda row: row["rank"])
            ends = [sentences[row["sentence"]][: row["position"] + 1] for row in own]
            naive.append((key, next(tokens for tokens in ends if tokens[-1] == role["token"]), role["token"]))
    found = list(zip(group, prefixes.tokens, prefixes.targets.tolist(), strict=True))
    assert found == naive and found[0][0] == (0, 0) and found[0][2] == token
    monkeypatch.setattr("memlens.role.effects.MOST", 1)  # one prefix has no interval
    code, out, _ = run("roles", index.folder, "--effects")
    (line,) = [line for line in out.splitlines() if line.startswith("token ")]
    assert code == 0 and "does not appear" in line and " to " not in line


def test_a_gated_memory_that_writes_along_what_it_reads_enriches_and_one_against_it_depletes(text: Path) -> None:
    network = tiny_model("llama")
    mlp, gain = network.model.layers[1].mlp, network.model.layers[1].post_attention_layernorm.weight
    with torch.no_grad():
        mlp.down_proj.weight[:, 0] = mlp.up_proj.weight[0] * gain
        mlp.down_proj.weight[:, 1] = -mlp.up_proj.weight[1] * gain
    found = roles_of(network, text, preset="released")  # its BOS alone is a prefix, which ends in no token
    assert "enrichment" in found["L1N0"] and "depletion" in found["L1N1"]
