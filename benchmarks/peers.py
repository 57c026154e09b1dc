"""Speed and memory of memlens and other tools that find the top triggers of every memory.

    python benchmarks/peers.py WORK [--model gpt2|bundled|FOLDER|FILE.gguf] [--tokens 20000] [--python PYTHON]

The other tools are installed into WORK/venv unless --python names an environment that has them. Every program runs in a
separate process with one thread, reads the same batches, and keeps the 50 highest coefficients of every memory:

    hooks            forward hooks on the down projections, then torch.cat and torch.topk
    TransformerLens  run_with_cache of TransformerLens 4, then torch.cat and torch.topk
    nnsight          a trace that saves the inputs of the down projections, then torch.cat and torch.topk
    prefixes         one forward pass per prefix, as in the paper's released program (500 tokens only)
    memlens          a scan, which also keeps statistics, histograms and ordinary examples

The last column compares the coefficients with those of plain hooks. Models have the shape of GPT-2, Llama or OPT.
"gpt2" has random weights and tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("transformer-lens==4.3.0", "nnsight==0.8.1")
ROOT = Path(__file__).parents[1]
TOP, BATCH_TOKENS, FEW = 50, 2048, 500
DOWN = (".mlp.c_proj", ".mlp.down_proj", ".fc2")


class Lists:
    """The highest coefficients of each memory of each layer and their places (sentence * 4096 + position)."""

    def __init__(self) -> None:
        self.best: dict[int, Any] = {}  # layer -> [top, memories]
        self.places: dict[int, Any] = {}
        self.finish: Callable[[], None] = lambda: None  # fills `best` for a program that keeps its own lists

    def add(self, layer: int, coefficients: Any, places: Any) -> None:
        """Merge coefficients [n, memories] at places [n] into the lists of a layer."""
        import torch

        labels = places[:, None].expand(-1, coefficients.shape[1])
        if layer in self.best:
            coefficients = torch.cat([self.best[layer], coefficients])
            labels = torch.cat([self.places[layer], labels])
        self.best[layer], order = coefficients.topk(min(TOP, len(coefficients)), dim=0)
        self.places[layer] = labels.gather(0, order)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the coefficients of each layer, [memories, top], highest first."""
        self.finish()
        return {f"best{layer}": best.T.numpy() for layer, best in self.best.items()}


def find_tokens(batch: Any) -> tuple[Any, Any]:
    """Return the rows of the flattened batch that are not padding, and their places."""
    import torch

    position = torch.arange(batch.tokens.shape[1])
    keep = position[None, :] < torch.from_numpy(batch.lengths)[:, None]
    places = torch.from_numpy(batch.sentences)[:, None] * 4096 + position[None, :]
    return keep.flatten().nonzero()[:, 0], places[keep]


Program = Callable[[Any], None]


def load_network(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def down_projections(network: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in network.named_modules() if name.endswith(DOWN)]


def with_hooks(folder: str, lists: Lists) -> Program:
    import torch

    body, inputs_by_layer = load_network(folder).base_model, {}
    for layer, (_, module) in enumerate(down_projections(body)):
        module.register_forward_pre_hook(lambda _, inputs, layer=layer: inputs_by_layer.update({layer: inputs[0]}))

    def run(batch: Any) -> None:
        body(torch.from_numpy(batch.tokens), use_cache=False)
        rows, places = find_tokens(batch)
        for layer, m in inputs_by_layer.items():
            lists.add(layer, m.reshape(-1, m.shape[-1])[rows], places)

    return run


def with_transformer_lens(folder: str, lists: Lists) -> Program:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    names = [f"blocks.{layer}.mlp.out.hook_in" for layer in range(bridge.cfg.n_layers)]

    def run(batch: Any) -> None:
        _, cache = bridge.run_with_cache(torch.from_numpy(batch.tokens), names_filter=names, return_type=None)
        rows, places = find_tokens(batch)
        for layer, name in enumerate(names):
            m = cache[name]
            lists.add(layer, m.reshape(-1, m.shape[-1])[rows], places)

    return run


def with_nnsight(folder: str, lists: Lists) -> Program:
    import torch
    from nnsight import NNsight

    body = load_network(folder).base_model
    traced, names = NNsight(body), [name for name, _ in down_projections(body)]

    def run(batch: Any) -> None:
        with traced.trace(torch.from_numpy(batch.tokens), use_cache=False):
            found = [traced.get(name).input for name in names].save()
        rows, places = find_tokens(batch)
        for layer, m in enumerate(found):
            lists.add(layer, m.reshape(-1, m.shape[-1])[rows], places)

    return run


def with_prefixes(folder: str, lists: Lists) -> Program:
    import torch

    body, inputs_by_layer = load_network(folder).base_model, {}
    for layer, (_, module) in enumerate(down_projections(body)):
        module.register_forward_pre_hook(lambda _, inputs, layer=layer: inputs_by_layer.update({layer: inputs[0]}))

    def run(batch: Any) -> None:
        for sentence, tokens, length in zip(batch.sentences, batch.tokens, batch.lengths, strict=True):
            for position in range(length):
                body(torch.from_numpy(tokens[None, : position + 1]), use_cache=False)
                for layer, m in inputs_by_layer.items():
                    lists.add(layer, m.reshape(-1, m.shape[-1])[-1:], torch.tensor([sentence * 4096 + position]))

    return run


def with_memlens(folder: str, lists: Lists) -> Program:
    import torch

    import memlens
    from memlens.scanner.scan import Scanner
    from memlens.scanner.state import ScanState
    from memlens.settings import ScanSettings
    from memlens.testing import tiny_tokenizer

    settings = ScanSettings(top=TOP, batch_tokens=BATCH_TOKENS, per_sentence="all", dedup="none", bos="no", threads=1)
    model = memlens.load(load_network(folder), tokenizer=tiny_tokenizer(), prove=False)
    worker = Scanner(model, settings, ScanState.start(model, range(len(model.layers)), settings))

    def run(batch: Any) -> None:
        worker._scan_batch(batch, np.zeros(len(batch.sentences), np.int64), None)

    def finish() -> None:
        found = {layer: scan.triggers.result()["top"] for layer, scan in worker.state.layers.items()}
        lists.best = {layer: torch.from_numpy(one.coefficients).T for layer, one in found.items()}

    lists.finish = finish
    return run


PROGRAMS = {
    "hooks": with_hooks,
    "TransformerLens": with_transformer_lens,
    "nnsight": with_nnsight,
    "prefixes": with_prefixes,
    "memlens": with_memlens,
}


def run_one(name: str, folder: str, sentences: Path, out: Path) -> None:
    """Run one program in this process and print its speed and memory as JSON."""
    if name == "memlens":
        from memlens.process_setup import prepare_process

        prepare_process()  # as the command does
    import torch

    from memlens.corpus.sentences import cut_batches

    torch.set_num_threads(1)
    saved = np.load(sentences)
    texts = list(enumerate(np.split(saved["tokens"], saved["edges"])))
    with torch.inference_mode():
        PROGRAMS[name](folder, Lists())(
            cut_batches(texts[:8], BATCH_TOKENS, None)[0]
        )  # warm up: imports, compilation, caches
        gc.collect()  # networks and hooks refer to each other, so the first network would stay in memory
        if name == "prefixes":
            texts = texts[: int(np.searchsorted(saved["edges"], FEW))]
        lists = Lists()
        program, batches = PROGRAMS[name](folder, lists), cut_batches(texts, BATCH_TOKENS, None)
        worked, began = time.process_time(), time.perf_counter()
        for batch in batches:
            program(batch)
        work, took = time.process_time() - worked, time.perf_counter() - began
    np.savez(out, **lists.arrays())
    tokens = sum(len(own) for _, own in texts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"tokens": tokens, "work": work, "seconds": took, "peak": peak}))


def prepare(model: str, work: Path, tokens: int) -> tuple[str, Path]:
    """Write the model and the sentences. Returns the folder and the file."""
    draw, file = np.random.default_rng(1), work / "sentences.npz"
    if model == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        folder = work / "gpt2-shape"
        if not folder.exists():
            GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
        lengths = np.clip(draw.lognormal(3.2, 0.5, tokens // 20), 3, 120).astype(int)
        texts = [draw.integers(0, 30_000, length) for length in lengths]
    else:
        import memlens
        from memlens.corpus.sentences import read_units
        from memlens.settings import CorpusSettings

        loaded = memlens.load(model)
        folder = Path(loaded.source if model != "bundled" else ROOT / "src" / "memlens" / "bundled" / "model")
        if folder.suffix == ".gguf":  # unpack it for tools that cannot read .gguf
            folder = work / folder.stem
            loaded.network.save_pretrained(folder)
            loaded.tokenizer.save(folder)
        units = [unit.text for unit in read_units(CorpusSettings(("bundled:prose",)))]
        texts = [np.array(one.ids[:120]) for one in loaded.tokenizer.encode(units) if one.ids]
    ends = np.cumsum([len(own) for own in texts])
    texts = texts[: int(np.searchsorted(ends, tokens)) + 1]
    np.savez(file, tokens=np.concatenate(texts).astype(np.int64), edges=np.cumsum([len(own) for own in texts])[:-1])
    return str(folder), file


def install(work: Path) -> str:
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
        constraints = ["--constraint", ROOT / "constraints.txt"]
        subprocess.run([python, "-m", "pip", "install", "-q", *constraints, ROOT, *PACKAGES], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="Folder for the environment, the model and results.")
    parser.add_argument("--model", default="bundled", help="Model to scan.")
    parser.add_argument("--tokens", type=int, default=20_000, help="Tokens to scan.")
    parser.add_argument("--python", help="Python of an environment that has the other tools.")
    parser.add_argument("--program", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        name, folder, sentences, out = options.program
        run_one(name, folder, Path(sentences), Path(out))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    python = options.python or install(options.work)
    folder, sentences = prepare(options.model, options.work, options.tokens)
    found, lists, failed = {}, {}, {}
    for name in PROGRAMS:
        out = options.work / f"{name}.npz"
        command = [python, __file__, str(options.work), "--program", name, folder, str(sentences), str(out)]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            if name in ("hooks", "memlens"):  # all others are compared with these
                raise SystemExit(f"{name} failed: {ran.stderr[-2000:]}")
            failed[name] = (ran.stderr.strip().splitlines() or ["unknown reason"])[-1]
            continue
        found[name], lists[name] = json.loads(ran.stdout.splitlines()[-1]), np.load(out)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    print("| program | tokens per second | speed of memlens | peak MB | coefficients equal to hooks |")
    print("| --- | --- | --- | --- | --- |")
    speed = {name: one["tokens"] / one["work"] for name, one in found.items()}
    for name, one in found.items():
        same = "not compared" if name == "prefixes" else f"{equal_share(lists['hooks'], lists[name]):.2%}"
        print(f"| {name} | {speed[name]:,.0f} | {speed['memlens'] / speed[name]:.2f} x | {one['peak']:,} | {same} |")
    for name, reason in failed.items():
        print(f"| {name} | failed: {reason} | | | |")


def equal_share(one: Any, other: Any) -> float:
    """Return the share of positive coefficients that are equal up to rounding."""
    pairs = [(one[name], other[name]) for name in one.files]
    shared = [(a[:, : b.shape[1]], b[:, : a.shape[1]]) for a, b in pairs]
    equal = [np.isclose(a, b, rtol=1e-4, atol=1e-5)[a > 0] for a, b in shared]
    return float(np.concatenate(equal).mean())


if __name__ == "__main__":
    main()
