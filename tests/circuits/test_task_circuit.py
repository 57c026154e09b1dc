"""The circuit of a task: scores, faithfulness and bad input, on pairs whose answers a tiny model gives itself."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from circuit_pairs import last_logits, make_pairs

import memlens
from memlens.circuits import task
from memlens.circuits.frozen import frozen_pass
from memlens.circuits.task import Pair, TaskCircuit, read_pairs, task_circuit
from memlens.errors import FilesError, SettingError
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return memlens.load(tiny_model("gpt2").double(), tokenizer=tiny_tokenizer())


@pytest.fixture(scope="module")
def pairs(model: MemoryModel) -> list[Pair]:
    return make_pairs(model)


@pytest.fixture(scope="module")
def result(model: MemoryModel, pairs: list[Pair]) -> TaskCircuit:
    return task_circuit(model, pairs, steps=3, random_sets=1)


def naive_metric(model: MemoryModel, pair: Pair, edits: Any) -> float:
    answers = [model.tokenizer.encode([text])[0].ids[0] for text in (pair.clean_answer, pair.patch_answer)]
    with model.edit(edits):
        logits = last_logits(model, model.tokenizer.encode([pair.clean_prefix])[0].ids)
    return float(logits[answers[0]] - logits[answers[1]])


def test_faithfulness_is_the_naive_ratio(model: MemoryModel, pairs: list[Pair], result: TaskCircuit) -> None:
    order = task.np.random.default_rng(0).permutation(len(pairs)).tolist()
    held_out, training = [pairs[i] for i in order[:4]], [pairs[i] for i in order[4:]]
    means: dict[int, torch.Tensor] = {layer: torch.zeros(4, 40, dtype=torch.float64) for layer in range(3)}
    for pair in training:
        with model.record(states=False) as recording:
            model.run_body(torch.tensor([model.tokenizer.encode([pair.patch_prefix])[0].ids]))
        for layer, m in recording.coefficients.items():
            means[layer] += m[0] / len(training)
    point = result.curve[3]
    circuit = {(memory.layer, memory.memory) for memory in list(result.scores)[: point.size]}

    def metric(kept: set[tuple[int, int]]) -> float:
        def change(m: torch.Tensor, _group: Any, layer: int) -> torch.Tensor:
            m = m.clone()
            for number in range(40):
                if (layer, number) not in kept:
                    m[0, :, number] = means[layer][:, number]
            return m

        edits = {layer: (lambda m, group, layer=layer: change(m, group, layer)) for layer in range(3)}
        return sum(naive_metric(model, pair, edits) for pair in held_out) / len(held_out)

    everything = {(layer, number) for layer in range(3) for number in range(40)}
    none, full = metric(set()), metric(everything)
    assert result.metric == pytest.approx(full, abs=1e-9) and result.ablated == pytest.approx(none, abs=1e-9)
    assert point.faithfulness == pytest.approx((metric(circuit) - none) / (full - none), abs=1e-9)
    assert point.complement == pytest.approx((metric(everything - circuit) - none) / (full - none), abs=1e-9)


def test_scores_are_mean_slopes_times_changes(model: MemoryModel, pairs: list[Pair]) -> None:
    """The slope of one memory by finite differences, at three points between the two inputs."""
    batch = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs[:2]])[0]
    layer, number, steps, epsilon = 1, 5, 3, 1e-5
    points = [(step + 0.5) / steps for step in range(steps)]
    scores = task._integrated_scores(model, batch, points=points)[layer]
    inputs = [task._first_inputs(model, tokens) for tokens in (batch.patch, batch.clean)]
    expected = 0.0
    for row in range(2):
        for position in range(4):
            slopes = []
            for point in points:
                states = inputs[0] + point * (inputs[1] - inputs[0])
                ends = []
                for sign in (1, -1):
                    change = torch.zeros(2, 4, 40, dtype=torch.float64)
                    change[row, position, number] = sign * epsilon

                    hook = model.layers[0].block.register_forward_pre_hook(
                        lambda _module, arguments, states=states: (states, *arguments[1:])
                    )
                    with model.edit({layer: lambda m, _group, change=change: m + change}):
                        logits = model.lens.state_logits(model.run_body(batch.clean)[:, -1])
                    hook.remove()
                    ends.append(float(batch.metric(logits)[row]))
                slopes.append((ends[0] - ends[1]) / (2 * epsilon))
            coefficients = []
            for tokens in (batch.clean, batch.patch):
                with model.record([layer], states=False) as recording:
                    model.run_body(tokens)
                coefficients.append(float(recording.coefficients[layer][row, position, number]))
            expected += sum(slopes) / steps * (coefficients[0] - coefficients[1])
    assert float(scores[number]) == pytest.approx(expected, abs=1e-6)


def test_relevance_scores_are_frozen_gradients_times_changes(model: MemoryModel, pairs: list[Pair]) -> None:
    result = task_circuit(model, pairs, held_out=pairs, method="relevance", random_sets=1)
    best = next(memory for memory in result.scores if memory.layer == 1)
    expected = 0.0
    for pair in pairs:
        clean, patch, (answer, other) = task._encode(model, pair, "pair")
        coefficients = []
        for tokens in (clean, patch):
            with model.record([1], states=False) as recording:
                model.run_body(torch.tensor([tokens]))
            coefficients.append(recording.coefficients[1][0, :, best.memory])
        target = partial(task._difference, answer=answer, other=other)
        with frozen_pass(model, torch.tensor([clean]), target, gate="half") as frozen:
            gradient = frozen.gradients([frozen.target]).coefficients[1][:, best.memory]
        expected += float((gradient * (coefficients[0] - coefficients[1])).sum()) / len(pairs)
    assert result.scores[best] == pytest.approx(expected, abs=1e-9)


def test_patching_scores_are_gradients_at_the_clean_prompt(model: MemoryModel, pairs: list[Pair]) -> None:
    batch = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs])
    scores = sum(task._integrated_scores(model, one, points=[1.0])[1] for one in batch)
    result = task_circuit(model, pairs, held_out=pairs, method="patching", random_sets=1)
    best = next(memory for memory in result.scores if memory.layer == 1)
    assert result.scores[best] == pytest.approx(float(scores[best.memory]) / len(pairs), abs=1e-9)


def test_scores_by_ablation_add_up_to_the_effect_of_all_memories(model: MemoryModel, pairs: list[Pair]) -> None:
    (batch,) = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs])
    means = task._mean_coefficients(model, [batch])
    points = [(step + 0.5) / 50 for step in range(50)]
    scores = torch.cat([*task._ablation_scores(model, batch, means=means, points=points).values()])
    whole, none = (task._masked_metric(model, batch, torch.full((120,), share), means) for share in (1.0, 0.0))
    assert float(scores.sum()) == pytest.approx(float((whole - none).sum()), rel=1e-3)


def test_scores_by_ablation_are_slopes_of_the_mask(model: MemoryModel, pairs: list[Pair]) -> None:
    (batch,) = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs])
    means = task._mean_coefficients(model, [batch])
    scores = torch.cat([*task._ablation_scores(model, batch, means=means, points=[0.3]).values()])
    for number in (3, 50, 119):
        step = torch.zeros(120, dtype=torch.float64)
        step[number] = 1e-5
        ends = [task._masked_metric(model, batch, 0.3 + sign * step, means).sum() for sign in (1, -1)]
        assert float(scores[number]) == pytest.approx(float(ends[0] - ends[1]) / 2e-5, abs=1e-6)


def test_the_gradient_of_the_mask_is_that_of_finite_differences(model: MemoryModel, pairs: list[Pair]) -> None:
    (batch,) = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs])
    means = task._mean_coefficients(model, [batch])
    ends = [task._masked_metric(model, batch, torch.full((120,), share), means) for share in (1.0, 0.0)]
    candidates = torch.tensor([3, 50, 81, 119])

    def objective(mask: torch.Tensor) -> tuple[float, torch.Tensor]:
        return task._mask_objective(model, batch, *ends, candidates, mask, means)

    mask = torch.tensor([0.2, 0.9, 0.5, 0.7], dtype=torch.float64)
    for number in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[number] = 1e-5
        slope = (objective(mask + step)[0] - objective(mask - step)[0]) / 2e-5
        assert float(objective(mask)[1][number]) == pytest.approx(slope, abs=1e-6)


def test_the_mask_objective_is_zero_error_for_all_memories(model: MemoryModel, pairs: list[Pair]) -> None:
    """All memories do the task alone, and nothing remains without them, so only the cost of memories is left."""
    (batch,) = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs])
    means = task._mean_coefficients(model, [batch])
    ends = [task._masked_metric(model, batch, torch.full((120,), share), means) for share in (1.0, 0.0)]
    value, _ = task._mask_objective(model, batch, *ends, torch.arange(120), torch.ones(120).double(), means)
    assert value == pytest.approx(120 * task._MASK_COST, abs=1e-9)


def test_a_learned_mask_does_the_task_with_fewer_memories(model: MemoryModel, pairs: list[Pair]) -> None:
    (batch,) = task._batches(model, [task._encode(model, pair, "pair") for pair in pairs])
    means = task._mean_coefficients(model, [batch])
    ends = [task._masked_metric(model, batch, torch.full((120,), share), means) for share in (1.0, 0.0)]
    candidates = torch.arange(120)
    mask = task._learn_mask(model, [batch], candidates, means, lambda *_: None)
    half = torch.full((120,), 0.5, dtype=torch.float64)
    values = [task._mask_objective(model, batch, *ends, candidates, one, means)[0] for one in (mask, half)]
    assert values[0] < values[1] and mask.min() < 0.2 and mask.max() > 0.8


def test_refining_changes_only_the_order_of_the_first_memories(model: MemoryModel, pairs: list[Pair]) -> None:
    plain, refined = (
        task_circuit(model, pairs, held_out=pairs, steps=2, random_sets=1, refine=refine) for refine in (False, True)
    )
    assert set(list(plain.scores)[:50]) == set(list(refined.scores)[:50]) and list(plain.scores) != list(refined.scores)
    assert list(plain.scores)[50:] == list(refined.scores)[50:]


def test_prompts_of_different_lengths_are_compared_position_by_position(model: MemoryModel, pairs: list[Pair]) -> None:
    """The mean of a position is taken over the patch prompts that have it, and a longer prompt repeats the last one."""
    short, long = make_pairs(model, 4, 3), make_pairs(model, 4, 5)
    result = task_circuit(model, pairs[:6] + short, held_out=[*long, *short], steps=1, random_sets=1)
    sums, counts = torch.zeros(4, 40, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    for pair in pairs[:6] + short:
        tokens = model.tokenizer.encode([pair.patch_prefix])[0].ids
        with model.record([2], states=False) as recording:
            model.run_body(torch.tensor([tokens]))
        sums[: len(tokens)] += recording.coefficients[2][0]
        counts[: len(tokens)] += 1
    means = task._mean_coefficients(
        model, task._batches(model, [task._encode(model, p, "") for p in pairs[:6] + short])
    )
    assert torch.allclose(means[2], sums / counts, atol=1e-9)
    edits = {
        layer: lambda m, _group, mean=mean: mean[torch.arange(m.shape[1]).clamp(max=3)][None]
        for layer, mean in means.items()
    }
    ablated = sum(naive_metric(model, pair, edits) for pair in [*long, *short]) / 8
    assert result.ablated == pytest.approx(ablated, abs=1e-9)


def test_held_out_pairs_can_be_given(model: MemoryModel, pairs: list[Pair]) -> None:
    result = task_circuit(model, pairs[:8], held_out=pairs[1:9], steps=1, random_sets=1)
    expected = sum(naive_metric(model, pair, {}) for pair in pairs[1:9]) / 8
    assert result.held_out == 8 and result.pairs == 16 and result.metric == pytest.approx(expected, abs=1e-9)
    with pytest.raises(SettingError, match="2 held-out pairs are too few"):
        task_circuit(model, pairs, held_out=pairs[:2])


def test_the_result_is_the_same_each_time(model: MemoryModel, pairs: list[Pair], result: TaskCircuit) -> None:
    assert task_circuit(model, pairs, steps=3, random_sets=1).to_json() == result.to_json()


def test_the_seed_decides_which_pairs_are_held_out(model: MemoryModel, pairs: list[Pair]) -> None:
    held_out = [pairs[i] for i in task.np.random.default_rng(1).permutation(len(pairs))[:4]]
    metric = sum(naive_metric(model, pair, {}) for pair in held_out) / 4
    assert task_circuit(model, pairs, steps=1, random_sets=1, seed=1).metric == pytest.approx(metric, abs=1e-9)


def test_the_ablation_sets_the_memories_to_their_means(
    model: MemoryModel, pairs: list[Pair], result: TaskCircuit
) -> None:
    edits = result.ablation().edits
    assert [edit.memories[0] for edit in edits] == result.memories
    training = [pairs[i] for i in task.np.random.default_rng(0).permutation(len(pairs))[4:]]
    means = task._mean_coefficients(model, task._batches(model, [task._encode(model, p, "pair") for p in training]))
    expected = [float(means[memory.layer][1:, memory.memory].mean()) for memory in result.memories]
    assert [edit.coefficient for edit in edits] == pytest.approx(expected, rel=1e-5)


def test_a_circuit_without_a_faithful_size_is_about_one_percent(
    model: MemoryModel, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "FAITHFUL", (100.0, 101.0))
    monkeypatch.setattr(task, "_SHARE_WITHOUT_FAITHFUL", 0.05)
    result = task_circuit(model, pairs, steps=1, random_sets=1)
    assert result.smallest is None and result.memories == list(result.scores)[:6]  # 5% of 120


def test_pairs_are_read_from_jsonl_json_and_csv(tmp_path: Path) -> None:
    pair = Pair("The dogs", "The dog", " are", " is")
    (tmp_path / "a.jsonl").write_text(json.dumps(vars(pair)) + "\n", encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps([vars(pair)]), encoding="utf-8")
    (tmp_path / "a.csv").write_text(",".join(vars(pair)) + "\n" + ",".join(vars(pair).values()), encoding="utf-8")
    assert [read_pairs(tmp_path / name) for name in ("a.jsonl", "a.json", "a.csv")] == [[pair]] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clean_prefix": "ccdfg"}, "pair 3: the clean prompt has 5 tokens and the patch prompt 4"),
        ({"clean_answer": "dg"}, "pair 3: the answer 'dg' is not one token of this model but 'd' \\+ 'g'"),
        ({"clean_answer": "c", "patch_answer": "c"}, "pair 3: both answers are 'c'"),
    ],
)
def test_bad_pairs_are_rejected(model: MemoryModel, pairs: list[Pair], changes: dict[str, str], message: str) -> None:
    rows = [Pair(**(vars(pair) | (changes if number == 2 else {}))) for number, pair in enumerate(pairs)]
    with pytest.raises(SettingError, match=message):
        task_circuit(model, rows)


def test_a_task_that_the_model_does_not_do_is_reported_first(model: MemoryModel, pairs: list[Pair]) -> None:
    swapped = [Pair(pair.clean_prefix, pair.patch_prefix, pair.patch_answer, pair.clean_answer) for pair in pairs]
    with pytest.raises(SettingError, match="prefers the clean answer in 0% of 10 pairs"):
        task_circuit(model, swapped)


def test_too_few_pairs_are_rejected(model: MemoryModel, pairs: list[Pair]) -> None:
    with pytest.raises(SettingError, match="3 pairs are too few; give at least 8"):
        task_circuit(model, pairs[:3])


def test_a_file_that_is_no_table_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("{]", encoding="utf-8")
    with pytest.raises(FilesError, match="neither JSON"):
        read_pairs(tmp_path / "pairs.jsonl")
