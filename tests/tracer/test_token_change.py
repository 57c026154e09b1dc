"""The tokens that change when a memory is silenced, against single passes with hooks written here."""

import json

import pytest
import torch

import memlens
from memlens.errors import SettingError
from memlens.tracer.token_change import token_change


def naive_p(model, fed, layer, silenced):
    """The next token's distribution with one memory at zero at the last position."""

    def change(m, group):
        m = m.clone()
        m[:, -1, silenced] = 0
        return m

    with model.edit({layer: change} if silenced is not None else {}):
        state = model.run_body(fed)[:, -1]
    return model.lens.capped(model.lens.state_logits(state))[0].double().softmax(0)


def test_changes_are_those_of_single_passes_and_the_control_is_the_largest_other_memory(scanned):
    index, model = memlens.open_index(scanned[0]), scanned[1]
    for name in ("L1N3", "L2N0"):
        layer, number = index.check(name).layer, index.check(name).memory
        changes, moved, bos = [], [], [model.tokenizer.bos] if model.tokenizer.adds_bos else []
        for trigger in index.triggers(name, limit=3):
            sentence = index.sentences([trigger.prefix.sentence])[trigger.prefix.sentence]
            fed = torch.tensor([bos + sentence["tokens"][: trigger.prefix.position + 1]])
            with model.record() as recording:
                model.run_body(fed)
            sizes = recording.coefficients[layer][0, -1].abs() * model.layers[layer].values.norm(dim=1)
            control = max((n for n in range(len(sizes)) if n != number), key=lambda n: float(sizes[n]))
            before = naive_p(model, fed, layer, None)
            changes.append(torch.stack([naive_p(model, fed, layer, n) - before for n in (number, control)]))
            moved.append(changes[-1].abs().sum(1) / 2)
        mean = torch.stack(changes).mean(0)
        result = token_change(index, model, name, triggers=3, top=4)
        assert result.triggers == len(changes)
        tokens = mean[0].argsort(stable=True).tolist()
        assert [one.id for one in result.falls] == tokens[:4]
        assert sorted(one.id for one in result.rises) == sorted(tokens[-4:])
        for one in (*result.falls, *result.rises):
            assert (one.change, one.control) == pytest.approx(mean[:, one.id].tolist(), abs=1e-6)
        assert (result.moved, result.control_moved) == pytest.approx(torch.stack(moved).mean(0).tolist(), abs=1e-6)
        assert result.shared == len({*tokens[:4]} & {*mean[1].argsort(stable=True).tolist()[:4]})
        assert f"{result.shared} of the same 4 tokens" in result.note
    with pytest.raises(SettingError, match="triggers is 0"):
        token_change(index, model, "L0N0", triggers=0)


def test_only_tokens_with_a_change_of_the_right_sign_fall_or_rise(scanned):
    index, model = memlens.open_index(scanned[0]), scanned[1]
    result = token_change(index, model, "L1N3", triggers=3, top=model.vocabulary)
    assert all(one.change < 0 for one in result.falls) and all(one.change > 0 for one in result.rises)
    changed = {one.id for one in result.falls} | {one.id for one in result.rises}
    assert len(changed) == len(result.falls) + len(result.rises)
    assert 0 < len(result.falls) < model.vocabulary and len(result.falls) != len(result.rises)


def test_show_effect_prints_the_changes_and_the_control(tiny_gpt2_values, run):
    index = tiny_gpt2_values
    name = next(name for name in ("L0N0", "L0N1", "L0N2", "L1N3") if index.triggers(name))
    code, out, _ = run("show", index.folder, name, "--effect", "--top", "3")
    assert code == 0 and "falls" in out and "silencing another large memory" in out
    code, out, _ = run("show", index.folder, name, "--effect", "--top", "1000")  # more than fall or rise
    every = token_change(index, index.load_model(), name, top=1000)
    assert code == 0 and len(every.falls) != len(every.rises)
    assert out.count("\n", out.index("falls")) > max(len(every.falls), len(every.rises))
    code, out, _ = run("show", index.folder, name, "--effect", "--top", "3", "--json")
    content = json.loads(out)
    result = token_change(index, index.load_model(), name, top=3)
    assert code == 0 and [one["id"] for one in content["falls"]] == [one.id for one in result.falls]
    assert content["note"] == result.note
