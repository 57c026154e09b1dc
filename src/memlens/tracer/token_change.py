"""TokenChange: the tokens whose probability changes most when a memory is silenced at its own triggers.

1. Run each top trigger and read p, the distribution of the next token.
2. Silence the memory at the last position, run the model, and read p again. Average the changes of p over the triggers,
   and list the tokens whose probability falls and rises most.
3. Repeat step 2 for a control: among the layer's other memories, the memory with the largest |m| * ||v|| at this
   position.

The control is needed because silencing almost any large memory lowers the tokens that the model predicts at its
triggers. Tokens that fall for the memory but not for the control are evidence about the memory.
"""

from dataclasses import dataclass

import torch

from memlens.errors import SettingError
from memlens.index.reader import Index
from memlens.memory import MemoryId
from memlens.models.memory_model import MemoryModel
from memlens.tracer.attribution import probabilities, silence_one_per_line
from memlens.tracer.prompt import check_count, check_top
from memlens.tracer.result import Token


@dataclass(frozen=True)
class ChangedToken(Token):
    """A token and the mean change of its probability."""

    change: float
    control: float  # mean change of the token's probability if the control is silenced


@dataclass(frozen=True)
class TokenChange:
    """The effects of silencing a memory and a control memory at the memory's top triggers."""

    memory: MemoryId
    triggers: int  # number of triggers on which the model was run
    falls: tuple[ChangedToken, ...]  # tokens with a negative change, largest decrease first
    rises: tuple[ChangedToken, ...]  # tokens with a positive change, largest increase first
    moved: float  # mean total variation between the distributions with and without the memory
    control_moved: float
    shared: int  # number of `falls` that are also among the tokens that fall most for the control

    @property
    def note(self) -> str:
        """The comparison with the control, in one sentence."""
        return (
            f"silencing it moves {self.moved:.2g} of the probability; silencing another large memory at the same "
            f"positions moves {self.control_moved:.2g} and lowers {self.shared} of the same {len(self.falls)} tokens"
        )


def token_change(
    index: Index, model: MemoryModel, memory: str | MemoryId, *, triggers: int = 10, top: int = 10
) -> TokenChange:
    """Silence a memory at its top triggers and return the tokens whose probability changes most.

    Args:
        index: The index.
        model: The scanned model.
        memory: The memory.
        triggers: Number of top triggers to run.
        top: Maximum number of falling tokens and of rising tokens to list.

    Raises:
        SettingError: The memory has no trigger, or a count is not valid.
        UnknownName: The index has no such memory.
    """
    name = index.check(memory)
    check_count(triggers, "triggers")
    check_top(top)
    prefixes = [trigger.prefix for trigger in index.triggers(name, limit=triggers)]
    if not prefixes:
        raise SettingError(f"{name} has no triggers, so there is nothing to silence; choose a memory that is active")
    sentences = index.sentences(sorted({prefix.sentence for prefix in prefixes}))
    bos = [model.tokenizer.bos] if model.tokenizer.adds_bos else []
    number, lengths = model.names.number(name), model.layers[name.layer].lengths()
    total, moved = torch.zeros(2, model.vocabulary, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for prefix in prefixes:
        fed = torch.tensor([[*bos, *sentences[prefix.sentence]["tokens"][: prefix.position + 1]]])
        with model.record([name.layer], states=False) as recording:
            before = probabilities(model, fed)
        sizes = recording.coefficients[name.layer][0, -1].abs() * lengths
        sizes[number] = -1
        control = model.names.name(name.layer, int(sizes.argmax()))
        last = torch.tensor([fed.shape[1] - 1], device=model.device)
        with model.edit(silence_one_per_line([name, control], last)):
            after = probabilities(model, fed.expand(2, -1))
        change = (after.cpu().double() - before.cpu().double()) / len(prefixes)
        total += change
        moved += change.abs().sum(1) / 2
    order = total.argsort(dim=1, stable=True)
    text = model.tokenizer.token_text

    def listed(tokens: list[int]) -> tuple[ChangedToken, ...]:
        return tuple(ChangedToken(t, text(t), float(total[0, t]), float(total[1, t])) for t in tokens)

    falling = [[token for token in order[row, :top].tolist() if total[row, token] < 0] for row in (0, 1)]
    rising = [token for token in order[0].flip(0)[:top].tolist() if total[0, token] > 0]
    shared, falls, rises = len({*falling[0]} & {*falling[1]}), listed(falling[0]), listed(rising)
    return TokenChange(name, len(prefixes), falls, rises, float(moved[0]), float(moved[1]), shared)
