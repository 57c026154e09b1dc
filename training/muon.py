"""Muon (Jordan et al., 2024): momentum whose update is made orthogonal, for the matrices inside the layers."""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: torch.Tensor, turns: int = 5) -> torch.Tensor:
    """Singular values brought near 1 by Newton-Schulz iteration; a stack of matrices at once."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)).bfloat16()
    for _ in range(turns):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Updates are scaled to the size that AdamW's have (0.2 a weight), so that the same learning rate suits both."""

    def __init__(self, params, lr: float = 0.0, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Matrices of one shape go through the iteration together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in (p for p in group["params"] if p.grad is not None):  # none: above the layer that was read
                shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                    updates.append(parameter.grad.lerp(state["momentum"], group["momentum"]))  # Nesterov's
                rate = group["lr"] * 0.2 * max(shape) ** 0.5
                for parameter, update in zip(parameters, orthogonal(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(update, alpha=rate)
