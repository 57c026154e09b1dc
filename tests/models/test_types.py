"""Every language model type of the installed transformers is accepted with a proof or refused with a reason."""

import pytest
import torch

from memlens.errors import UnsupportedModel
from memlens.testing_types import NotBuildable, causal_types, composite_types, kinds_of_memories

# at least so many are accepted, so many of them with experts, and fewer than so many cannot be built;
# docs/your-model.md has the types by name
TYPES = {"text": (causal_types, 120, 40, 12), "text beside other media": (composite_types, 45, 6, 32)}


@pytest.fixture(scope="module", params=TYPES)
def tried(request):
    """({type: its kinds of memories, or the reason why there are none}, what is to be reached)"""
    types, *bounds = TYPES[request.param]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on several
    found = {model_type: kinds_of_memories(model_type) for model_type in types()}
    torch.set_num_threads(threads)
    return found, bounds


def test_most_types_are_proven_and_many_of_them_with_experts(tried):
    outcomes, (accepted, with_experts, _) = tried
    proven = [kinds for kinds in outcomes.values() if isinstance(kinds, set)]
    assert len(proven) >= accepted and sum("routed" in kinds for kinds in proven) >= with_experts


def test_every_refusal_names_its_reason_in_one_line(tried):
    for model_type, error in tried[0].items():
        if isinstance(error, UnsupportedModel):
            text = str(error)
            assert "\n" not in text and len(text) < 400, text
            assert "cannot be read as memories: " in text or "check of " in text or "by itself" in text, model_type


def test_few_types_cannot_be_built(tried):
    outcomes, (_, _, unbuilt) = tried
    assert sum(isinstance(error, NotBuildable) for error in outcomes.values()) < unbuilt
