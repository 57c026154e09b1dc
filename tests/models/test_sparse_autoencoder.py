"""`as_sae` gives the coefficients and output of the running model, with the names of SAE tools."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memlens
from memlens.errors import MemlensError
from memlens.models.memory_model import MemoryModel
from memlens.testing import tiny_model, tiny_tokenizer

FAMILIES = ("gpt2", "opt", "llama", "gemma2", "gpt_neox", "olmo2", "qwen2", "starcoder2")
TOKENS = torch.tensor([[5, 17, 3, 40, 8, 2, 29], [1, 9, 9, 31, 12, 6, 7]])


def loaded(family: str, **settings: Any) -> MemoryModel:
    return memlens.load(tiny_model(family, **settings), tokenizer=tiny_tokenizer())


def seen(model: MemoryModel, layer: int, module_in: str, module_out: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, the coefficients, the block's output and y of a pass, recorded with torch hooks."""
    record: dict[str, Tensor] = {}
    first, last = model.network.get_submodule(module_in), model.network.get_submodule(module_out)
    handles = [
        first.register_forward_pre_hook(lambda _, given: record.update(x=given[0])),
        last.register_forward_pre_hook(lambda _, given: record.update(m=given[0])),
        last.register_forward_hook(lambda _, given, output: record.update(output=output)),
    ]
    with model.record([layer], coefficients=False) as recording:
        model.run_body(TOKENS)
    for handle in handles:
        handle.remove()
    added = recording.y[layer]
    return record["x"], record["m"], record["output"], added.reshape(-1, added.shape[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_gives_the_coefficients_and_decode_the_output_of_the_block(family: str) -> None:
    model = loaded(family)
    for layer in range(len(model.layers)):
        sae = memlens.as_sae(model, layer)
        x, m, output, added = seen(model, layer, sae.cfg.module_in, sae.cfg.module_out)
        torch.testing.assert_close(sae.encode(x), m, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(sae.decode(m), output, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(sae(x), output, atol=1e-6, rtol=1e-5)
        is_added = torch.allclose(output.reshape(added.shape), added, atol=1e-6)
        assert sae.cfg.adds_output == is_added == (family not in ("gemma2", "olmo2"))


def test_plain_gated_and_biased_blocks_by_their_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 24)
    relu = memlens.as_sae(loaded("gpt2", activation_function="relu"), 1)
    with torch.no_grad():
        relu.b_enc += 0.3
    for row, m in zip(x, relu.encode(x), strict=True):
        for memory in (0, 7, 39):
            product = sum(row[i] * relu.W_enc[i, memory] for i in range(24)) + relu.b_enc[memory]
            assert m[memory].item() == pytest.approx(max(product.item(), 0.0), abs=1e-6)
    gated = memlens.as_sae(loaded("llama"), 1)
    gate, up = x @ gated.W_enc + gated.b_enc, x @ gated.W_up + gated.b_up
    torch.testing.assert_close(gated.encode(x), gate * torch.sigmoid(gate) * up)
    for sae in (relu, gated):
        m = sae.encode(x)
        total = sae.b_dec + sum(m[2, memory] * sae.W_dec[memory] for memory in range(sae.cfg.d_sae))
        torch.testing.assert_close(sae.decode(m)[2], total, atol=1e-5, rtol=1e-5)


def test_folding_value_norms_keeps_the_output() -> None:
    model, x = loaded("llama"), torch.randn(3, 24)
    sae = memlens.as_sae(model, 0)
    before, lengths = sae(x), sae.W_dec.norm(dim=1)
    m = sae.encode(x)
    sae.fold_W_dec_norm()
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(sae.cfg.d_sae))
    torch.testing.assert_close(sae.encode(x), m * lengths)
    torch.testing.assert_close(sae(x), before, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(memlens.as_sae(model, 0)(x), before)  # the model itself is unchanged
    other = memlens.as_sae(model, 0)
    other.load_state_dict(sae.state_dict())
    assert torch.equal(other.encode(x), sae.encode(x)) and torch.equal(other(x), sae(x))
    half = sae.to(torch.bfloat16)
    assert half.encode(x).dtype == half(x).dtype == torch.bfloat16


# sae-lens 6.54 (SAE, SAEConfig, TranscoderConfig, and what HookedSAETransformer.add_sae asks of cfg.metadata), and what
# SAEBench's custom_saes/README.md asks of an SAE
OF_SAE = ("W_enc", "b_enc", "W_dec", "b_dec", "cfg", "dtype", "device", "encode", "decode", "forward", "to")
OF_SAE += ("fold_W_dec_norm", "use_error_term", "hook_dict")
OF_CFG = ("d_in", "d_sae", "d_out", "dtype", "device", "apply_b_dec_to_input", "normalize_activations", "to_dict")
OF_CFG += ("reshape_activations", "metadata", "architecture", "model_name", "hook_name", "hook_layer")
OF_METADATA = ("model_name", "hook_name", "hook_name_out", "hook_head_index", "context_size", "prepend_bos")


def test_names_and_shapes_match_sae_tools() -> None:
    sae = memlens.as_sae(loaded("gpt2"), 2)
    for owner, names in ((sae, OF_SAE), (sae.cfg, OF_CFG), (sae.cfg.metadata, OF_METADATA)):
        assert [name for name in names if not hasattr(owner, name)] == []
    d_in, d_sae = sae.cfg.d_in, sae.cfg.d_sae
    assert (sae.W_enc.shape, sae.b_enc.shape) == ((d_in, d_sae), (d_sae,))
    assert (sae.W_dec.shape, sae.b_dec.shape) == ((d_sae, sae.cfg.d_out), (sae.cfg.d_out,))
    assert isinstance(sae.W_dec, nn.Parameter) and sae.cfg.to_dict()["metadata"]["hook_layer"] == 2
    assert (sae.cfg.hook_name, sae.cfg.metadata.hook_name_out) == (
        "blocks.2.mlp.hook_in",
        "blocks.2.hook_mlp_out",
    )
    assert memlens.as_sae(loaded("olmo2"), 0).cfg.hook_name == "model.layers.0.mlp.gate_proj"
    half = memlens.as_sae(loaded("gpt2"), 0, dtype=torch.bfloat16)
    assert half.encode(torch.randn(2, d_in)).dtype == half.dtype == torch.bfloat16 and half.cfg.dtype == "bfloat16"


def test_layers_with_experts_are_rejected() -> None:
    with pytest.raises(MemlensError, match="layer 9 does not exist"):
        memlens.as_sae(loaded("gpt2"), 9)
    with pytest.raises(MemlensError, match="no router"):
        memlens.as_sae(loaded("mixtral"), 0)
