"""Write a checkpoint as a transformers folder: float16 safetensors, configuration and tokenizer.

python training/export.py --work DIR OUT            # the last checkpoint of DIR/run
"""

import argparse
import json
from pathlib import Path

import torch
from model import new_model
from transformers import AutoTokenizer

LIMIT = 16_000_000  # bytes; the weights are part of the Python package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--work", type=Path, required=True, help="working directory of the training")
    parser.add_argument("--name", default="run", help="subdirectory of the run")
    parser.add_argument(
        "--checkpoint", type=Path, help="checkpoint or snapshot to export; default: the last checkpoint"
    )
    options = parser.parse_args()

    path = options.checkpoint or max((options.work / options.name).glob("checkpoint-*.pt"))
    state = torch.load(path, weights_only=True)
    model = new_model(seed=0, **state["shape"])
    model.load_state_dict(state["model"])
    model.half().save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.work / "tokenizer").save_pretrained(options.out)

    # float16 is for storage only. Without this, transformers would also compute in float16, which is slow on CPUs.
    config_path = options.out / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) | {"dtype": "float32"}
    config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts = {"steps": state["step"], "tokens": state["tokens"], "epochs_begun": state["epoch"] + 1}
    facts["decay"] = None if state["decay"] is None else {"from_step": state["decay"][0], "steps": state["decay"][1]}
    facts["decay_by_clock"] = state.get("clock") is not None
    (options.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    weights = options.out / "model.safetensors"
    weights.chmod(0o644)  # safetensors makes files readable by their owner only
    size = weights.stat().st_size
    print(f"{path.name}: step {state['step']}, {state['tokens']} tokens -> {options.out}, weights {size} bytes")
    if size > LIMIT:
        raise SystemExit(f"the weights are larger than {LIMIT} bytes")


if __name__ == "__main__":
    main()
