"""Seeds 40 faults into a copy of the sources, one at a time, and reports which of them the default suite catches.

    python tests/mutations.py            all faults, as CSV on stdout; exit code 1 if one survives
    python tests/mutations.py 12-20      some of them, counted from 1

A row of FAULTS names a file below src/memlens, its exact text, the wrong text, what is wrong, and the default tests
that are most likely to notice. The text must occur exactly once: after a change of the source, change the row as well.
"""

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 1200  # for the tests of one fault; a fault that makes them hang is caught

# fmt: off
FAULTS = (
    ("scanner/kernels.py", "positions[m, place - 1] > position)", "positions[m, place - 1] < position)",
     "ties prefer the later position", "scanner/test_top_triggers.py"),
    ("scanner/kernels.py", "stop = min(i + ROWS, starts[s + 1])", "stop = min(i + ROWS - 1, starts[s + 1])",
     "the last row of a step is not searched for the extreme",
     "scanner/test_top_triggers.py::test_many_updates_over_wide_blocks_equal_brute_force"),
    ("scanner/kernels.py", "summed[c] += value", "summed[c] += none",
     "the last rows of a sentence are not added to the mean",
     "scanner/test_layer.py::test_totals_are_sums_extremes_and_counts_by_position"),
    ("scanner/kernels.py", "sums = Sums(np.empty(columns, np.float64)", "sums = Sums(np.empty(columns, np.float32)",
     "sums over sentences in float32", "scanner/test_layer.py::test_sums_over_sentences_are_exact"),
    ("scanner/kernels.py", 'np.searchsorted(EDGES, positions, side="right")', "np.searchsorted(EDGES, positions)",
     "position ranges end one position later",
     "scanner/test_layer.py::test_totals_are_sums_extremes_and_counts_by_position"),
    ("scanner/layer.py", '    "quadrants.counts",\n', "",
     "counts of quadrants of merged parts are not added",
     "scanner/test_layer.py::test_every_statistic_merges_to_the_same_bits_in_any_tree"),
    ("scanner/layer.py", '    "routing.weight",\n', "",
     "router weights of merged parts are not added",
     "index/test_mixture.py::test_experts_are_counted_weighed_and_listed_as_by_hand"),
    ("scanner/state.py", "            first = b\n", "            first = b + 1\n",
     "resuming skips the batch after a finished run", "scanner/test_state.py"),
    ("scanner/state.py", "self.tokens += other.tokens", "self.tokens = other.tokens",
     "tokens of merged parts are not added",
     "scanner/test_scan.py::test_segments_of_any_partition_merge_to_the_same_state"),
    ("scanner/scan.py", "and fresh_from == 0 else fresh_from", "else fresh_from",
     "repeated sentences count the prefix of BOS again",
     "scanner/test_scan.py::test_a_repeated_sentence_has_no_prefix_of_bos_alone"),
    ("models/proof.py", "states[later] = states[later].flip(-1)", "states[later] = states[later]",
     "causality is not tested", "models/test_sabotage.py::test_a_sabotaged_network_is_rejected"),
    ("models/proof.py", "if not deviation <= self.tolerance:", "if deviation > self.tolerance:",
     "NaN passes the proof", "models/test_proof.py::test_not_a_number_is_rejected"),
    ("models/proof.py", ".abs().amax(-1).clamp_min(1e-6)", ".abs().amax().clamp_min(1e-6)",
     "deviations are relative to the largest position",
     "models/test_proof.py::test_a_deviation_is_relative_to_the_largest_number_at_its_position"),
    ("models/discover.py", " or not all(map(self._follows_formula, groups)):", ":",
     "a layer of another activation is taken for alike",
     "models/test_discover.py::test_layers_of_the_same_structure_may_have_different_scales_and_activations"),
    ("models/match.py", "return (up + 1) * gate", "return up * gate",
     "the clamped product lacks a term", "models/test_discover.py::test_a_clamped_product_of_gate_and_up_is_found"),
    ("models/decompose.py", "- (bias.mean() if relative else 0)", "",
     "relative constants include the mean bias",
     "models/test_decompose.py::test_relative_parts_sum_to_the_logit_minus_the_mean_logit"),
    ("models/decompose.py", "        states = states - states.mean(-1, keepdim=True)\n", "",
     "the scale of a norm is that of states that are not centered",
     "models/test_decompose.py::test_parts_sum_to_the_models_logit_and_memories_and_biases_to_their_block"),
    ("experiments/prefix_pass.py", "shift = 0 if prefixes.bos is None else 1", "shift = 0",
     "states are read one position early if BOS is fed",
     "experiments/test_section5.py::test_every_table_equals_brute_force"),
    ("experiments/prefix_pass.py", "(added * sign).topk(", "added.topk(",
     "vetoes are the strongest pushes",
     "experiments/test_section5.py::test_vetoes_count_the_memories_that_take_most_from_the_residuals_token"),
    ("experiments/composition.py", "+ (holds - share) * times * (len(times) / whole) - (holds - base)",
     "+ (holds - share) * times * (len(times) / whole)",
     "the interval ignores the error of the base rate",
     "experiments/test_section5.py::test_where_all_prefixes_agree_alike_there_is_no_excess_and_no_doubt_about_it"),
    ("experiments/local_edits.py", "random.integers(0, lengths)", "random.integers(0, lengths - 1)",
     "a random edit never removes the last token",
     "experiments/test_section4.py::test_any_token_of_a_prefix_may_be_removed_at_random"),
    ("stats.py", "n, pairs = (len(ones) + len(others)) / 2 - 1,", "n, pairs = (len(ones) + len(others)) / 2,",
     "the variance of an area is off by one",
     "test_stats.py::test_the_area_under_the_roc_curve_and_its_interval_are_those_of_all_pairs"),
    ("pattern/score.py", "matches = round((2 * scores[0] - 1 + random) * held)",
     "matches = round((2 * scores[0] - 1 - random) * held)",
     "held-out matches are counted with the wrong sign", "pattern/test_score.py pattern/test_broad_patterns.py"),
    ("vocab/kernels.py", "above[c] += _ONE if score > target else _ZERO",
     "above[c] += _ONE if score >= target else _ZERO",
     "a rank counts the target itself", "vocab/test_values_rows.py::test_softmax_entropy_and_rank_are_the_definitions"),
    ("vocab/kernels.py", "np.log(all_total) - all_weighted / all_total", "np.log(all_total) + all_weighted / all_total",
     "entropy has a wrong sign", "vocab/test_values_rows.py::test_softmax_entropy_and_rank_are_the_definitions"),
    ("files.py", "            sync_file(beside)\n", "",
     "a replaced file is not synced", "test_durable_files.py"),
    ("index/format.py", "(end is not None and high >= end)", "(end is not None and high > end)",
     "a table may refer to one memory too many",
     "index/test_check.py::test_files_that_are_whole_but_of_different_scans_are_not_of_one_piece"),
    ("index/check.py", "t.position >= c.length", "t.position > c.length",
     "a position at the end of a sentence is valid",
     "index/test_check.py::test_a_position_at_the_end_of_a_sentence_is_one_too_many"),
    ("files.py", ".acquire(timeout=0)", ".is_locked",
     "two scans write to one folder", "test_durable_files.py"),
    ("index/staging.py", "            sync_folder(folder)  # a power cut must", "            # a power cut must",
     "the removal of a manifest is not synced",
     "index/test_faults.py::test_the_old_manifest_is_gone_for_good_before_any_table_is_replaced"),
    ("annotations/log.py", "lock.acquire(timeout=_LOCK_SECONDS)", "pass",
     "events are appended without a lock",
     "annotations/test_log.py::test_nothing_is_written_while_another_process_holds_the_lock"),
    ("annotations/log.py", "os.fsync(file.fileno())", "pass",
     "confirmed events are not synced",
     "annotations/test_log.py::test_a_full_or_failing_disk_leaves_the_log_as_it_was"),
    ("pool.py", "if self.deaths > RETRIES:", "if self.deaths >= RETRIES:",
     "one retry is missing", "test_pool.py::test_an_item_that_kills_every_worker_is_given_up"),
    ("corpus/sentences.py", "if places > batch_tokens:", "if places >= batch_tokens:",
     "a batch is never quite full", "corpus/test_corpus_batches.py"),
    ("corpus/repeats.py", "while ids[-1] > sentence:", "while ids[-1] < sentence:",
     "later sentences count as earlier ones", "corpus/test_repeats.py"),
    ("index/search.py", "ORDER BY queries DESC, {order}", "ORDER BY queries, {order}",
     "memories that match fewer texts come first", "index/test_search_values.py"),
    ("web/security.py", 'site not in ("same-origin", "none")', 'site not in ("same-origin", "same-site", "none")',
     "pages of other ports and names may write",
     "web/test_web_security.py::test_a_request_from_another_site_is_refused"),
    ("circuits/graph.py", "constant = float((self.constants[layer] * cotangent).sum())", "constant = 0.0",
     "edges from biases lack the biases of keys",
     "circuits/test_prompt_circuit.py::test_edges_into_every_node_sum_to_its_relevance"),
    ("probing/fit.py", "without = Columns.of(columns.x, train[fitted])\n    order,",
     "without = Columns.of(columns.x, train)\n    order,",
     "the held-out part decides its own scale",
     "probing/test_probe.py::test_a_probe_equals_scikit_learns_own_pipeline"),
    ("role/rules.py", '"variance": alive & ~heavy', '"variance": alive',
     "heavy tails count against the rate of another role",
     "role/test_roles.py::test_heavy_tails_are_found_against_decoys"),
)
# fmt: on


def main(arguments: list[str]) -> int:
    first, _, last = (arguments[0] if arguments else f"1-{len(FAULTS)}").partition("-")
    numbers = range(int(first), int(last or first) + 1)
    rows = [FAULTS[number - 1] for number in numbers]
    for file, text, *_ in FAULTS:
        if (count := (ROOT / "src/memlens" / file).read_text("utf-8").count(text)) != 1:
            sys.exit(f"{file} contains {text!r} {count} times instead of once; correct the row in tests/mutations.py")
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="memlens-mutations-") as name:
        folder = Path(name)
        listed = subprocess.check_output(["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, text=True)
        for path in (path for path in listed.split("\0") if (ROOT / path).is_file()):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, folder / path)
        if run_tests(folder, " ".join(dict.fromkeys(" ".join(row[4] for row in rows).split()))):
            sys.exit("the tests fail without a fault")
        table = csv.writer(sys.stdout)
        table.writerow(["number", "file", "fault", "result"])
        for number, (file, text, wrong, description, tests) in zip(numbers, rows, strict=True):
            path = folder / "src/memlens" / file
            source = path.read_text("utf-8")
            path.write_text(source.replace(text, wrong), "utf-8")
            is_caught = run_tests(folder, tests)
            shutil.copy2(ROOT / "src/memlens" / file, path)  # with its time, so that compiled code is found again
            survivors += not is_caught
            table.writerow([number, file, description, "caught" if is_caught else "survived"])
            sys.stdout.flush()
    return 1 if survivors else 0


def run_tests(folder: Path, tests: str) -> bool:
    """Return True if a test fails or hangs. Exits if the tests cannot be run."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "NUMBA_CACHE_DIR": str(folder / ".numba")}
    paths = [f"tests/{test}" for test in tests.split()]
    try:
        ran = subprocess.run([*command, *paths], cwd=folder, env=environment, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return True
    if ran.returncode not in (0, 1):
        sys.exit(f"pytest cannot run {tests}:\n{ran.stdout.decode()}{ran.stderr.decode()}")
    return ran.returncode == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
