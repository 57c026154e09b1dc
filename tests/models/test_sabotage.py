"""Networks that deviate from memories by one part in a thousand are rejected."""

from functools import partial

import pytest
import torch
from torch import nn

from memlens.errors import UnsupportedModel
from memlens.models.load import load
from memlens.testing import WIDTH, tiny_model

SMALL = 1e-3  # 0.1%
LAYER = 1
DTYPES = [torch.float32, *(pytest.param(dtype, marks=pytest.mark.sweep) for dtype in (torch.bfloat16, torch.float16))]


class Around(nn.Module):
    """A module whose output is changed: change(module, input, output) -> output."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change
        self.extra = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)) / WIDTH**0.5)

    def forward(self, *arguments, **named):
        output = self.inner(*arguments, **named)
        first = arguments[0] if arguments else named["hidden_states"]
        if isinstance(output, tuple):
            return (self.change(self, first, output[0]), *output[1:])
        return self.change(self, first, output)


class Mixed(nn.Module):
    """A feed-forward part of a Llama with its coefficients changed: change(x, m) -> m."""

    def __init__(self, mlp, change):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.change = mlp.gate_proj, mlp.up_proj, mlp.down_proj, change

    def forward(self, x):
        m = nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(self.change(self, x, m))


class OtherWeights(nn.Linear):
    """A linear map that uses weights other than `weight`."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * (1 + SMALL * torch.sign(self.weight)), self.bias)


def later(x):
    """Each position's successor."""
    return torch.cat([x[:, 1:], x[:, :1]], 1)


def around(part):
    """Return a function that makes a sabotage from a change of this part's output in a Llama block."""

    def changing(change):
        def sabotage(network):
            block = network.model.layers[LAYER]
            setattr(block, part, Around(getattr(block, part), change))

        return sabotage

    return changing


around_mlp, around_attention, around_norm = around("mlp"), around("self_attn"), around("post_attention_layernorm")


def around_block(change):
    def sabotage(network):
        network.model.layers[LAYER] = Around(network.model.layers[LAYER], change)

    return sabotage


def with_mlp(kind, change=None):
    def sabotage(network):
        block = network.model.layers[LAYER]
        block.mlp = kind(block.mlp, change)

    return sabotage


def inside(change):
    return with_mlp(Mixed, change)


class Softmaxed(Mixed):
    """An activation that depends on all units of the layer, but not on their order."""

    def __init__(self, mlp, change):
        super().__init__(mlp, change)
        self.act_fn = nn.Softmax(-1)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ClampedGate(Mixed):
    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=100)
        return self.down_proj(nn.functional.silu(gate) * self.up_proj(x))


class LateKeys(nn.Linear):
    """A linear map that scales its output from position 12 on."""

    def forward(self, x):
        return torch.cat([super().forward(x[:, :12]), super().forward(x[:, 12:]) * (1 + SMALL)], 1)


class GatedAttention(Mixed):
    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x.cumsum(1) / 3))


def gated_attention(network):
    """Sabotage all layers. A single one would look like a layer without memories in a hybrid."""
    for block in network.model.layers:
        block.mlp = GatedAttention(block.mlp, None)


def other_weights(name, kind=OtherWeights):
    def sabotage(network):
        own = getattr(network.model.layers[LAYER].mlp, name)
        other = kind(own.in_features, own.out_features, bias=own.bias is not None)
        other.load_state_dict(own.state_dict())
        setattr(network.model.layers[LAYER].mlp, name, other)

    return sabotage


def noise(like):
    return torch.randn(like.shape).to(like)


def around_final_norm(network):
    network.model.norm = Around(network.model.norm, lambda own, x, y: y + SMALL * y.abs())


class Conv1D(nn.Module):
    """A class with the name of a transformers map that adds a term if `more` is not 0."""

    def __init__(self, own, more):
        super().__init__()
        self.weight, self.nf = nn.Parameter(own.weight.data.T.contiguous()), own.out_features
        self.register_buffer("more", torch.tensor(more))

    def forward(self, x):
        y = x @ self.weight
        return y + self.more * y.abs()


def namesakes(network):
    for number, block in enumerate(network.model.layers):
        block.mlp.gate_proj = Conv1D(block.mlp.gate_proj, SMALL if number == LAYER else 0.0)


class Rounding(torch.Tensor):
    """Weights that round their input, like some quantized weights."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        if function is nn.functional.linear:
            x, weight, *bias = arguments
            scale = x.abs().amax(-1, keepdim=True) / 127
            return nn.functional.linear((x / scale).round() * scale, weight.as_subclass(torch.Tensor), *bias)
        return super().__torch_function__(function, types, arguments, named or {})


def rounding(*names):
    def sabotage(network):
        for block in list(network.model.layers)[LAYER:]:
            for name in names:
                own = getattr(block.mlp, name)
                own._parameters["weight"] = nn.Parameter(own.weight.data.as_subclass(Rounding), requires_grad=False)

    return sabotage


def rounding_head(network):
    head = network.lm_head
    head._parameters["weight"] = nn.Parameter(head.weight.data.as_subclass(Rounding), requires_grad=False)


def test_a_hook_on_all_modules_is_rejected():
    network = tiny_model("llama", mlp_bias=False)
    own = network.model.layers[LAYER].mlp.gate_proj
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: output * (1 + SMALL * torch.sign(output)) if module is own else None
    )
    try:
        with pytest.raises(UnsupportedModel, match="check of"):
            load(network)
    finally:
        handle.remove()


def hooked(name):
    def sabotage(network):
        own = getattr(network.model.layers[LAYER].mlp, name)
        own.register_forward_hook(lambda module, given, output: output * (1 + SMALL * torch.sign(output)))

    return sabotage


def bound(name):
    """Replace the forward function of a linear map."""

    def sabotage(network):
        own = getattr(network.model.layers[LAYER].mlp, name)
        forward = own.forward
        own.forward = lambda x: forward(x) * (1 + SMALL * torch.sign(x[..., :1]))

    return sabotage


SABOTAGE = {
    "an extra term of the input": around_mlp(lambda own, x, y: y + SMALL * x),
    "a second hidden path": around_mlp(lambda own, x, y: y + SMALL * torch.tanh(x @ own.extra) @ own.extra.T),
    "a scale that depends on the input": around_mlp(lambda own, x, y: y * (1 + SMALL * x.mean(-1, keepdim=True))),
    "a bias that depends on the token": around_mlp(lambda own, x, y: y + SMALL * own.extra[x.argmax(-1)]),
    "noise, as of a dropout left on": around_mlp(lambda own, x, y: y + SMALL * noise(y)),
    "a squashed output": around_mlp(lambda own, x, y: 5 * torch.tanh(y / 5)),
    "outputs of other positions": around_mlp(lambda own, x, y: y + SMALL * y.cumsum(1)),
    "a read of the next position": around_mlp(lambda own, x, y: y + SMALL * later(y)),
    "mixed coefficients": inside(lambda own, x, m: m + SMALL * m.roll(1, -1)),
    "coefficients of the position before": inside(lambda own, x, m: m + SMALL * m.roll(1, 1)),
    "positions that are treated otherwise": around_mlp(lambda own, x, y: torch.cat([y[:, :4], 2 * y[:, 4:]], 1)),
    "positions further on": around_mlp(lambda own, x, y: torch.cat([y[:, :25], (1 + SMALL) * y[:, 25:]], 1)),
    "coefficients of positions further on": inside(lambda own, x, m: torch.cat([m[:, :9], 2 * m[:, 9:]], 1)),
    "a stream that changes further on": around_block(lambda own, x, o: torch.cat([o[:, :20], 2 * o[:, 20:]], 1)),
    "keys that change further on": other_weights("gate_proj", LateKeys),
    "clamped coefficients": inside(lambda own, x, m: m.clamp(-200, 200)),
    "a clamped gate": with_mlp(ClampedGate),
    "a clamped output": around_mlp(lambda own, x, y: y.clamp(-50, 50)),
    "a clamped stream": around_block(lambda own, x, o: o.clamp(-50, 50)),
    "a clamped input": around_norm(lambda own, s, x: x.clamp(-4, 4)),
    "gated attention": gated_attention,
    "an activation over all units": with_mlp(Softmaxed),
    "a coefficient with a term of its own": inside(lambda own, x, m: m + SMALL * torch.sin(own.up_proj(x))),
    "normed coefficients": inside(lambda own, x, m: m / (1 + SMALL * m.norm(dim=-1, keepdim=True))),
    "keys that are not shown": other_weights("gate_proj"),
    "values that are not shown": other_weights("down_proj"),
    "a hook on the keys": hooked("gate_proj"),
    "a hook on the values": hooked("down_proj"),
    "a class with the name of a known one": namesakes,
    "values that round their coefficients": rounding("down_proj"),
    "gates that round their input": rounding("gate_proj"),
    "ups that round their input": rounding("up_proj"),
    "weights that all round their input": rounding("gate_proj", "up_proj", "down_proj"),
    "an output embedding that rounds its input": rounding_head,
    "another function of the keys": bound("up_proj"),
    "another function of the values": bound("down_proj"),
    "attention that looks ahead": around_attention(lambda own, x, y: y + SMALL * later(x)),
    "work on the stream behind the sum": around_block(lambda own, x, o: o + SMALL * torch.tanh(o)),
    "the block's input added again": around_block(lambda own, x, o: o + SMALL * x),
    "a norm with a term of its own": around_norm(lambda own, s, x: x + SMALL * x.abs()),
    "a lens with a term of its own": around_final_norm,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sabotage", SABOTAGE)
def test_a_sabotaged_network_is_rejected(sabotage, dtype):
    network = tiny_model("llama", mlp_bias=False)
    SABOTAGE[sabotage](network)
    with pytest.raises(UnsupportedModel) as caught:
        load(network.to(dtype))
    assert "\n" not in str(caught.value)


class Wrapped(torch.Tensor):
    """A tensor subclass that redefines all operations, like quantized weights."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        plain = [one.inner if isinstance(one, cls) else one for one in arguments]
        return function(*plain, **(named or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_weights_that_redefine_operations_are_rejected(name, dtype):
    network = tiny_model("llama", mlp_bias=False).to(dtype)
    own = getattr(network.model.layers[LAYER].mlp, name)
    own._parameters["weight"] = Wrapped(own.weight.data)
    with pytest.raises(UnsupportedModel, match=rf"layers.1.mlp.{name}.weight is not a plain tensor \(Wrapped\)"):
        load(network)


class Hidden(nn.Module):
    """A feed-forward part whose coefficients are not an elementwise function of key products."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return self.outward(torch.softmax(self.inward(x), -1))


class Beside(nn.Module):
    """The attention of a parallel block with a second, unseen feed-forward part."""

    def __init__(self, attention, way):
        super().__init__()
        self.attention, self.second, self.way = attention, Hidden(), way
        weights = torch.randn(2, WIDTH, 3 * WIDTH, generator=torch.Generator().manual_seed(6)) / WIDTH**0.5
        self.inward, self.outward = nn.Parameter(weights[0]), nn.Parameter(weights[1].T.contiguous())

    def forward(self, hidden_states, *arguments, **named):
        first, *rest = self.attention(hidden_states, *arguments, **named)
        ways = {
            "as a module": lambda x: self.second(x),
            "flattened": lambda x: self.second(x.reshape(-1, WIDTH)).reshape(x.shape),
            "in its code": lambda x: Hidden.forward(self.second, x),
            "of plain parameters": lambda x: (
                SMALL * torch.einsum("bpm,md->bpd", (x @ self.inward).tanh(), self.outward)
            ),
        }
        return (first + ways[self.way](hidden_states), *rest)


class Inline(Hidden):
    """A Llama block whose feed-forward part is not a module but part of the block's code."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        del block.mlp

    def forward(self, hidden_states, *arguments, **named):
        added, _ = self.block.self_attn(self.block.input_layernorm(hidden_states), *arguments, **named)
        states = hidden_states + added
        return states + super().forward(self.block.post_attention_layernorm(states))


def beside(way, layers=lambda network: network.transformer.h, attention="attn"):
    def sabotage(network):
        block = layers(network)[LAYER]
        setattr(block, attention, Beside(getattr(block, attention), way))

    return sabotage


beside_llama = partial(beside, layers=lambda network: network.model.layers, attention="self_attn")


class OfParameters(Inline):
    """A block whose code adds a function of plain parameters to the stream before its feed-forward part."""

    def __init__(self, block):
        mlp = block.mlp
        super().__init__(block)
        self.mlp, self.extra = mlp, nn.Parameter(self.inward.weight.detach().clone())

    def forward(self, hidden_states, *arguments, **named):
        added, _ = self.block.self_attn(self.block.input_layernorm(hidden_states), *arguments, **named)
        states = hidden_states + added
        states = states + SMALL * torch.relu(states @ self.extra.T * 2) @ self.extra
        return states + self.mlp(self.block.post_attention_layernorm(states))


def of_parameters(network):
    network.model.layers[LAYER] = OfParameters(network.model.layers[LAYER])


def hidden_mlp(network):
    network.model.layers[LAYER].mlp = Hidden()


def inline(network):
    network.model.layers[LAYER] = Inline(network.model.layers[LAYER])


UNSEEN = {
    "beside others": ("gptj", beside("as a module"), "attn.second"),
    "beside others, flattened": ("gptj", beside("flattened"), "attn.second"),
    "beside others, in the code of an attention": ("gptj", beside("in its code"), "attn.second.outward"),
    "in a layer without others": ("llama", hidden_mlp, "mlp"),
    "in the code of a layer without others": ("llama", inline, "outward"),
    "of plain parameters, beside others": ("gptj", beside("of plain parameters"), "attn.outward"),
    "of plain parameters, in an attention": ("llama", beside_llama("of plain parameters"), "self_attn.outward"),
    "of plain parameters, in the code of a layer": ("llama", of_parameters, "extra"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", UNSEEN)
def test_unseen_memories_are_rejected(where, dtype):
    family, sabotage, part = UNSEEN[where]
    network = tiny_model(family)
    sabotage(network)
    with pytest.raises(UnsupportedModel, match=rf"layer 1.*: {part} processes each position alone"):
        load(network.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_feed_forward_part_that_mixes_positions_is_rejected(dtype):
    network = tiny_model("llama", mlp_bias=False)
    inside(lambda own, x, m: m.cumsum(1) / 3)(network)
    with pytest.raises(UnsupportedModel, match=r"layer 1: self_attn.o_proj and mlp.down_proj add to the stream"):
        load(network.to(dtype))


LEGITIMATE = {
    "a constant": lambda own, x, y: y * 0.37,
    "a gain": lambda own, x, y: y * own.extra[0],
    "nothing": lambda own, x, y: y,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", LEGITIMATE)
def test_scaled_memories_are_accepted(scale, dtype):
    network = tiny_model("llama", mlp_bias=False)
    around_mlp(LEGITIMATE[scale])(network)
    model = load(network.to(dtype))
    assert model.proof is not None and (model.layers[LAYER].scale is None) == (scale == "nothing")
