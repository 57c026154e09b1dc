"""Every causal LM type of the installed transformers is accepted with a proof or refused with a reason."""

import pytest
import torch

from memlens.errors import UnsupportedModel
from memlens.models.load import load
from memlens.testing_types import NotBuildable, causal_types, tiny_network

ACCEPTED, WITH_EXPERTS = 120, 40  # at least; docs/your-model.md has the types by name


@pytest.fixture(scope="module")
def outcomes():
    """{type: its kinds of memories, or the reason why there are none}"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on several
    found = {}
    for model_type in causal_types():
        try:
            model = load(tiny_network(model_type))
            assert model.proof is not None
            found[model_type] = {group.kind for layer in model.layers for group in layer.groups}
        except (UnsupportedModel, NotBuildable) as error:
            found[model_type] = error
    torch.set_num_threads(threads)
    return found


def test_most_types_are_proven_and_many_of_them_with_experts(outcomes):
    accepted = [kinds for kinds in outcomes.values() if isinstance(kinds, set)]
    assert len(accepted) >= ACCEPTED and sum("routed" in kinds for kinds in accepted) >= WITH_EXPERTS


def test_every_refusal_names_its_reason_in_one_line(outcomes):
    for model_type, error in outcomes.items():
        if isinstance(error, UnsupportedModel):
            text = str(error)
            assert "\n" not in text and len(text) < 400, text
            assert "cannot be read as memories: " in text or "check of " in text or "by itself" in text, model_type


def test_few_types_cannot_be_built(outcomes):
    assert sum(isinstance(error, NotBuildable) for error in outcomes.values()) < 20
