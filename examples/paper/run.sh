#!/usr/bin/env bash
# Run all experiments of the paper: run.sh MODEL TRAIN VALIDATION INDEX. To resume an interrupted run, run it again.
# WHERE: options for workers, such as --executor ray. SAMPLE: options for smaller samples, such as --sample 500.
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
