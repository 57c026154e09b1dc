"""The bundled model: a GPT-2 of 16 small ReLU layers, its loss, and the count of its dead memories."""

from collections.abc import Iterable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

IGNORED = -100  # target of padding


def new_model(seed: int, vocabulary: int = 16384, positions: int = 128) -> GPT2LMHeadModel:
    """A model with fresh weights: 16 layers as in the paper, 512 memories each, about 5.3 million parameters."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_layer=16,
        n_embd=128,
        n_inner=512,
        n_head=4,
        activation_function="relu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config)
    initialise(model)
    return model


def initialise(model: GPT2LMHeadModel) -> None:
    """Draw the matrices anew, wider than GPT-2's 0.02, which is meant for 768 dimensions and more.

    Adam moves every weight by about the learning rate a step, all keys the same way as long as the hidden states are
    much alike, as they are early on. Keys that begin at 0.02 are soon carried to where no input makes them positive,
    and a dead memory gets no gradient to come back. With a standard deviation of 1 / sqrt(inputs) the same step is
    small against the key. As in GPT-2, what is added to the residual stream is divided by sqrt(2 * layers).
    """
    residual = (2 * model.config.n_layer) ** -0.5
    for block in model.transformer.h:
        for layer, scale in (
            (block.attn.c_attn, 1.0),
            (block.attn.c_proj, residual),
            (block.mlp.c_fc, 1.0),
            (block.mlp.c_proj, residual),
        ):
            torch.nn.init.normal_(layer.weight, std=scale * layer.weight.shape[0] ** -0.5)  # (inputs, outputs)
    torch.nn.init.normal_(model.transformer.wte.weight, std=0.06)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of hidden states against an output embedding, a slice of positions at a time.

    The logits of a whole batch (tokens x 16384) would not fit the cache, and autograd would keep several copies of
    them. Here the gradients are made at once in the forward pass, slice by slice, in the logits' own buffer.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = hidden.new_zeros(())
        for start in range(0, len(hidden), chunk):
            part, target = hidden[start : start + chunk], targets[start : start + chunk, None]
            probabilities = part @ weight.T
            probabilities -= probabilities.amax(dim=1, keepdim=True)
            loss -= probabilities.gather(1, target).sum()
            probabilities.exp_()
            total = probabilities.sum(dim=1, keepdim=True)
            loss += total.log().sum()
            probabilities /= total
            probabilities.scatter_add_(1, target, -torch.ones_like(target, dtype=probabilities.dtype))
            torch.mm(probabilities, weight, out=grad_hidden[start : start + chunk])
            grad_weight.addmm_(probabilities.T, part)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None


def start_from_frequencies(model: GPT2LMHeadModel, counts: torch.Tensor, size: float = 10.0) -> None:
    """Let the fresh model predict every token as often as it occurs, whatever the input.

    Otherwise that is the first thing it learns, and it learns it by having all layers add one and the same vector to
    the residual stream: the hidden states become alike, and memories die by the dozen. Here the constant comes from
    the bias of the last norm instead, along one direction, in which each embedding holds its token's log frequency.
    """
    log_frequency = torch.log((counts + 1) / (counts + 1).sum()).float()
    direction = torch.nn.functional.normalize(torch.randn(model.config.n_embd), dim=0)
    embedding = model.transformer.wte.weight.data
    embedding -= torch.outer(embedding @ direction, direction)
    embedding += torch.outer((log_frequency - log_frequency.mean()) / size, direction)
    model.transformer.ln_f.bias.data = size * direction


def summed_loss(model: GPT2LMHeadModel, inputs: torch.Tensor, targets: torch.Tensor, chunk: int = 256) -> torch.Tensor:
    """Negative log likelihood of all targets that are not padding, in nats, with gradients.

    No attention mask is needed: padding comes last, and a causal model does not look ahead.
    """
    hidden = model.transformer(inputs).last_hidden_state
    wanted = targets != IGNORED
    return ChunkedCrossEntropy.apply(hidden[wanted], model.transformer.wte.weight, targets[wanted], chunk)


@torch.no_grad()
def validate(model: GPT2LMHeadModel, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, list[float]]:
    """Mean loss a token, and for every layer the share of dead memories: those that no input token makes positive."""
    fired = [torch.zeros(model.config.n_inner, dtype=torch.bool) for _ in model.transformer.h]
    real = torch.zeros(0)

    def watch(seen: torch.Tensor):
        def hook(module, arguments, coefficients: torch.Tensor) -> None:
            seen.logical_or_((coefficients[real] > 0).any(dim=0))

        return hook

    layers = zip(model.transformer.h, fired, strict=True)
    hooks = [block.mlp.act.register_forward_hook(watch(seen)) for block, seen in layers]
    loss = tokens = 0.0
    for inputs, targets in batches:
        real = targets != IGNORED
        logits = model(inputs).logits[real]
        loss += torch.nn.functional.cross_entropy(logits, targets[real], reduction="sum").item()
        tokens += int(real.sum())
    for hook in hooks:
        hook.remove()
    return loss / tokens, [1 - seen.float().mean().item() for seen in fired]
