"""Every language model type of the installed transformers is proven or rejected with a reason, in two sets of sizes."""

import pytest
import torch

from memlens.errors import UnsupportedModel
from memlens.testing import OTHER_SIZES, USUAL_SIZES, NotBuildable, causal_types, composite_types, kinds_of_memories

# One type for each kind of block. The sweep runs all types.
SAMPLE = ("gpt_neox", "phi3", "gemma3_text", "granite", "gpt_oss", "jamba")
# (types, sizes, at least so many proven, at least so many of them with experts, fewer than so many not buildable);
# docs/your-model.md lists the types
SWEEPS = {
    "text": (causal_types, USUAL_SIZES, 120, 40, 12),
    "multimodal": (composite_types, USUAL_SIZES, 45, 6, 32),
    "text, other sizes": (causal_types, OTHER_SIZES, 100, 30, 40),
}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_with_other_sizes_is_proven(model_type):
    kinds = kinds_of_memories(model_type, OTHER_SIZES, seed=1)
    assert isinstance(kinds, set), kinds


@pytest.fixture(scope="module", params=SWEEPS)
def sweep(request):
    """({type: its kinds of memories, or the reason why there are none}, bounds)"""
    types, sizes, *bounds = SWEEPS[request.param]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for tiny products
    outcomes = {model_type: kinds_of_memories(model_type, sizes) for model_type in types()}
    torch.set_num_threads(threads)
    return outcomes, bounds


@pytest.mark.sweep
def test_most_types_are_proven_and_many_of_them_with_experts(sweep):
    outcomes, (proven, with_experts, _) = sweep
    kinds = [kinds for kinds in outcomes.values() if isinstance(kinds, set)]
    assert len(kinds) >= proven and sum("routed" in one for one in kinds) >= with_experts


@pytest.mark.sweep
def test_every_rejection_states_its_reason_in_one_line(sweep):
    for model_type, error in sweep[0].items():
        if isinstance(error, UnsupportedModel):
            text = str(error)
            assert "\n" not in text and len(text) < 400, text
            assert "cannot be read as memories: " in text or "cannot be proven to be made of" in text, model_type


@pytest.mark.sweep
def test_few_types_cannot_be_built(sweep):
    outcomes, (_, _, unbuilt) = sweep
    assert sum(isinstance(error, NotBuildable) for error in outcomes.values()) < unbuilt
