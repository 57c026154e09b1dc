"""Train the bundled model.

    python training/train.py --work DIR                             # start, or resume from the last checkpoint
    python training/train.py --work DIR --decay 1500                # resume; decay the rate to 0 within 1,500 steps
    python training/train.py --work DIR --decay-until 1794843480    # resume; decay the rate to 0 until this Unix time

The learning rate warms up, stays constant, and decays linearly once this is requested, so the length of the run need
not be known in advance. SIGTERM and SIGINT write a checkpoint and stop. The same command resumes the run.

DIR/run contains checkpoint-*.pt (the last two), snapshots/step-*.pt (weights at selected steps), curve.csv (loss),
valid.csv (held-out loss and dead memories per layer) and pid.
"""

import argparse
import csv
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import Batch, Text, batch, epoch_plan
from model import IGNORED, new_model, revive, start_from_frequencies, summed_loss, validate
from muon import Muon
from transformers import OPTForCausalLM

SHAPE = ("vocabulary", "positions", "layers", "width", "memories")


def optimizers_for(model: OPTForCausalLM, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the rest, with weight decay on matrices only."""
    inside = [p for p in model.model.decoder.layers.parameters() if p.dim() > 1]
    outside = [p for p in model.parameters() if p.dim() > 1 and not any(p is q for q in inside)]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": outside, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    return [Muon(inside, weight_decay=weight_decay), adam]


def learning_rate(
    step: int, peak: float, warmup: int, decay: tuple[int, int] | None, clock: tuple[float, float] | None
) -> float:
    """Return the learning rate of a step.

    It rises linearly during warm-up and is then constant. From step decay[0] on, it falls to 0 within decay[1] steps,
    or between the two times of `clock`.
    """
    rate = peak * min(1.0, (step + 1) / warmup)
    if decay is not None:
        rate *= max(0.0, 1 - (step - decay[0]) / decay[1])
    if clock is not None:
        rate *= min(1.0, max(0.0, (clock[1] - time.time()) / (clock[1] - clock[0])))
    return rate


def save(state: dict[str, Any], run: Path) -> None:
    """Write a checkpoint under a temporary name, rename it, and keep the last two."""
    path = run / f"checkpoint-{state['step']:07d}.pt"
    torch.save(state, run / "checkpoint.partial")
    (run / "checkpoint.partial").replace(path)
    for old in sorted(run.glob("checkpoint-*.pt"))[:-2]:
        old.unlink()


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a CSV file. A new file starts with a header."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def validation_batches(text: Text, options: argparse.Namespace) -> list[Batch]:
    """Return a fixed subset of the held-out text: every n-th batch."""
    batches = epoch_plan(text, options.length, options.batch_tokens, options.single, seed=0, epoch=0)
    return [batch(text, spans) for spans in batches[:: max(1, len(batches) // options.valid_batches)]]


class Run:
    """A training run: its state and its loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory = options.work / options.name
        self.directory.mkdir(parents=True, exist_ok=True)
        self.text = Text.load(options.work / "train.npz")
        self.held_out = validation_batches(Text.load(options.work / "valid.npz"), options)
        vocabulary = len((options.work / "counts.csv").read_text(encoding="utf-8").splitlines()) - 1
        self.shape = dict(
            zip(SHAPE, (vocabulary, options.length, options.layers, options.width, options.memories), strict=True)
        )
        self.model = new_model(options.seed, **self.shape)
        counts = np.bincount(self.text.tokens, minlength=vocabulary)
        start_from_frequencies(self.model, torch.from_numpy(counts))
        self.optimizers = optimizers_for(self.model, options.weight_decay)
        self.rate = 0.0
        self.step = self.epoch = self.index = self.tokens = 0
        self.decay: tuple[int, int] | None = None
        self.clock: tuple[float, float] | None = None
        self.stopping = False
        checkpoints = sorted(self.directory.glob("checkpoint-*.pt"))
        if checkpoints:
            self.load(checkpoints[-1])
        if options.decay and self.decay is None:
            self.decay = (self.step, options.decay)
        if options.decay_until and self.clock is None:
            self.clock = (time.time(), options.decay_until)
        elif options.decay_until and self.clock is not None and self.clock[1] != options.decay_until:
            share = (self.clock[1] - time.time()) / (self.clock[1] - self.clock[0])  # continue at the current rate
            self.clock = (options.decay_until - (options.decay_until - time.time()) / share, options.decay_until)

    def load(self, path: Path) -> None:
        """Restore the state of a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.epoch, self.index, self.tokens = (state[k] for k in ("step", "epoch", "index", "tokens"))
        self.decay, self.clock = state["decay"], state.get("clock")
        print(f"resumed from {path.name}", flush=True)

    def save(self) -> None:
        """Write a checkpoint. Epoch and index determine all randomness, because the model has no dropout."""
        state = {k: getattr(self, k) for k in ("step", "epoch", "index", "tokens", "decay", "clock", "shape")}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        save({"model": self.model.state_dict(), **state}, self.directory)

    def snapshot(self) -> None:
        """Write the weights, for series.py and export.py."""
        (self.directory / "snapshots").mkdir(exist_ok=True)
        state = {k: getattr(self, k) for k in ("step", "epoch", "tokens", "decay", "shape")}
        path = self.directory / "snapshots" / f"step-{self.step:07d}.pt"
        torch.save({"model": self.model.state_dict(), **state}, path)

    def advance(self, spans) -> tuple[float, float]:
        """Take one optimizer step. Returns the mean loss and the gradient norm before clipping."""
        self.rate = learning_rate(self.step, self.options.peak, self.options.warmup, self.decay, self.clock)
        for optimizer, share in zip(self.optimizers, (1.0, self.options.adam_share), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * self.rate
        inputs, targets = batch(self.text, spans)
        count = int((targets != IGNORED).sum())
        loss = summed_loss(self.model, inputs, targets, self.depth()) / count
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self.step, self.index, self.tokens = self.step + 1, self.index + 1, self.tokens + count
        return loss.item(), norm.item()

    def depth(self) -> int | None:
        """Return the number of layers for this step: None for all, or a random number from the upper half.

        Early exits train the residual stream of the upper layers to be readable through the output embedding, as the
        paper reads it (see README.md).
        """
        random = np.random.default_rng([self.options.seed, self.step])
        if random.random() >= self.options.exits:
            return None
        return int(random.integers(self.options.layers // 2, self.options.layers))

    def report(self) -> None:
        """Append the held-out loss and the share of dead memories per layer to valid.csv."""
        loss, dead = validate(self.model, self.held_out)
        row = {"step": self.step, "tokens": self.tokens, "loss": f"{loss:.4f}", "perplexity": f"{math.exp(loss):.2f}"}
        row |= {"dead": f"{sum(dead) / len(dead):.4f}"} | {f"dead_{i}": f"{share:.4f}" for i, share in enumerate(dead)}
        append(self.directory / "valid.csv", row)
        print("valid", {k: row[k] for k in ("step", "perplexity", "dead")}, f"worst {max(dead):.3f}", flush=True)

    def revive(self) -> None:
        """Reinitialize dead memories and clear their optimizer state."""
        rng = np.random.default_rng([self.options.seed, self.step])
        plan = epoch_plan(self.text, self.options.length, self.options.batch_tokens, self.options.single, 0, 0)
        torch.manual_seed(self.step)
        revived = revive(self.model, [batch(self.text, plan[i]) for i in rng.choice(len(plan), 16, replace=False)])
        for layer, dead in zip(self.model.model.decoder.layers, revived, strict=True):
            for parameter, rows in (
                (layer.fc1.weight, dead),
                (layer.fc1.bias, dead),
                (layer.fc2.weight, (slice(None), dead)),
            ):
                for optimizer in self.optimizers:
                    for kept in optimizer.state.get(parameter, {}).values():
                        if kept.shape == parameter.shape:
                            kept[rows] = 0.0
        counts = [int(dead.sum()) for dead in revived]
        append(self.directory / "revived.csv", {"step": self.step, "memories": sum(counts), "by_layer": counts})
        print("revived", sum(counts), counts, flush=True)

    def finished(self) -> bool:
        """Return True after the decay or the requested number of steps."""
        decayed = self.decay is not None and self.step >= sum(self.decay)
        decayed = decayed or (self.clock is not None and time.time() >= self.clock[1])
        return decayed or (self.options.steps is not None and self.step >= self.options.steps)

    def go(self) -> None:
        """Train until finished or stopped by a signal."""
        if self.step == 0 and 0 in self.options.snapshots:
            self.snapshot()
        saved = began = time.monotonic()
        logged, losses = self.tokens, []
        while not (self.stopping or self.finished()):
            plan = epoch_plan(
                self.text, self.options.length, self.options.batch_tokens, self.options.single,
                self.options.seed, self.epoch,
            )  # fmt: skip
            while self.index < len(plan) and not (self.stopping or self.finished()):
                loss, norm = self.advance(plan[self.index])
                losses.append(loss)
                if self.step % self.options.log_every == 0:
                    speed = (self.tokens - logged) / (time.monotonic() - began)
                    row = {"step": self.step, "epoch": self.epoch, "tokens": self.tokens}
                    row |= {"loss": f"{sum(losses) / len(losses):.4f}", "norm": f"{norm:.3f}"}
                    row |= {"rate": f"{self.rate:.2e}", "tokens_per_second": int(speed)}
                    append(self.directory / "curve.csv", row)
                    print(row, flush=True)
                    began, logged, losses = time.monotonic(), self.tokens, []
                if self.step % self.options.valid_every == 0:
                    self.report()
                is_time = self.options.revive_every and self.step % self.options.revive_every == 0
                if is_time and self.rate > self.options.revive_above * self.options.peak:
                    self.revive()
                if self.step in self.options.snapshots:
                    self.snapshot()
                if time.monotonic() - saved > 60 * self.options.save_minutes:
                    self.save()
                    saved = time.monotonic()
            if self.index >= len(plan):
                self.epoch, self.index = self.epoch + 1, 0
        self.report()
        self.save()
        if self.finished():
            self.snapshot()
        print("finished" if self.finished() else "stopped", "at step", self.step, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory with train.npz and valid.npz")
    add("--name", default="run", help="subdirectory of the working directory for this run")
    add("--steps", type=int, help="stop at this step")
    add("--decay", type=int, help="start the decay now and end it after this many steps")
    add("--decay-until", type=float, help="start the decay now and end it at this time, in seconds since 1970")
    add("--layers", type=int, default=10)
    add("--width", type=int, default=192, help="dimensions of the residual stream")
    add("--memories", type=int, default=768, help="memories per layer")
    add("--peak", type=float, default=3e-3, help="peak learning rate")
    add(
        "--adam-share",
        type=float,
        default=0.5,
        help="learning rate of embeddings, biases and norms, relative to --peak",
    )
    add("--warmup", type=int, default=200, help="steps of warm-up")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="maximum gradient norm")
    add("--batch-tokens", type=int, default=3072, help="tokens per batch, including padding")
    add("--length", type=int, default=128, help="maximum sequence length, including BOS")
    add("--single", type=float, default=0.25, help="share of sequences with a single sentence")
    add(
        "--exits", type=float, default=0.0, help="share of steps whose loss is computed after a layer of the upper half"
    )
    add("--seed", type=int, default=1)
    add("--threads", type=int, default=2)
    add("--log-every", type=int, default=25, help="steps between log lines")
    add("--valid-every", type=int, default=250, help="steps between validations")
    add("--valid-batches", type=int, default=8)
    add("--revive-every", type=int, default=0, help="steps between revivals of dead memories; 0: never")
    add(
        "--revive-above", type=float, default=0.3, help="stop reviving when the rate falls below this share of its peak"
    )
    add("--save-minutes", type=float, default=5.0)
    steps = [0, 100, 200, 400, 800, 1600, 3200, 6400, 12800]
    add("--snapshots", type=int, nargs="*", default=steps, help="steps at which the weights are saved")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    run = Run(options)
    (run.directory / "pid").write_text(f"{os.getpid()}\n")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: setattr(run, "stopping", True))
    run.go()


if __name__ == "__main__":
    main()
