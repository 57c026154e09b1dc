"""Loops that are compiled ahead: their types are those of a scan, no torch is loaded for it, and once is enough."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from memlens.models.groups import CoefficientBlock, LinearGroup
from memlens.scanner import ahead
from memlens.scanner.block import take_block_
from memlens.scanner.layer import LayerScan
from memlens.scanner.lists import make_candidates
from memlens.scanner.positions import _count_
from memlens.settings import ScanSettings

GROUP = LinearGroup(
    key_projection=torch.nn.Linear(4, 3), up_projection=torch.nn.Linear(4, 3), down=torch.nn.Linear(3, 4),
    activation="silu", activate=torch.nn.functional.silu,
)  # fmt: skip


@pytest.mark.parametrize("gated", [False, True])
def test_what_is_compiled_ahead_is_what_a_scan_needs(gated: bool) -> None:
    layer = LayerScan(0, 3, bottom=gated, gated=gated, settings=ScanSettings(top=2))
    block = torch.ones(4, 3)
    candidates = make_candidates(np.arange(4), np.arange(4) // 2, np.arange(4) % 2)
    layer.update(CoefficientBlock(GROUP, (2, 2), None, block, None, block if gated else None), candidates)
    before = [set(take_block_.signatures), set(_count_.signatures)]
    ahead.compile_loops()
    assert [set(take_block_.signatures), set(_count_.signatures)] == before


def test_the_process_that_compiles_loads_no_torch() -> None:
    code = "import sys, memlens.scanner.ahead; print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_nothing_is_started_where_loops_are_kept_or_there_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(ahead, "start_program", lambda module: started.append(module))
    monkeypatch.setattr(ahead, "_started", [])
    for cores, kept, expected in ((2, True, 0), (1, False, 0), (2, False, 1)):
        monkeypatch.setattr(ahead, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(ahead, "is_kept", lambda made, kept=kept: kept)
        ahead.start_compiling()
        assert len(started) == expected
