"""What patterns are looked for with. Validated once, here."""

from __future__ import annotations

from dataclasses import dataclass

from memlens.errors import SettingError

MOST_TRIGGERS = 64  # a set of prefixes is a word of so many bits


@dataclass(frozen=True)
class PatternSettings:
    top: int = 25  # triggers of a memory that are looked at
    rate: float = 0.01  # expected share of chance among all patterns of the model
    background: int = 150_000  # random prefixes that triggers are compared with
    seed: int = 0

    def __post_init__(self) -> None:
        if not 3 <= self.top <= MOST_TRIGGERS:
            raise SettingError(f"--top is {self.top}; a pattern needs 3 triggers and memlens looks at most at 64")
        if not 0 < self.rate < 1:
            raise SettingError(f"--rate is {self.rate}; it is a share of false discoveries between 0 and 1, like 0.01")
        if self.background < 1000:
            raise SettingError(f"--background is {self.background}; fewer than 1000 random prefixes tell nothing")
        if self.seed < 0:
            raise SettingError(f"--seed is {self.seed}; it must be 0 or more")
