#!/usr/bin/env bash
# The paper's experiments, start to finish: run.sh MODEL TRAIN VALIDATION INDEX. Stopped anywhere, the same command goes on.
# WHERE holds options that say where it runs (--executor ray ...), SAMPLE options that make the experiments smaller.
set -euo pipefail
model=$1 train=$2 validation=$3 index=$4
read -ra where <<<"${WHERE:-}"
read -ra sample <<<"${SAMPLE:-}"
memlens info "$model"
memlens scan "$model" "$train" -o "$index" --preset paper --top 50 "${where[@]}"
memlens values "$index" "${where[@]}"
memlens patterns "$index" --top 25
memlens experiment "$index" all --validation "$validation" "${where[@]}" "${sample[@]}"
memlens report "$index"
memlens check "$index"
