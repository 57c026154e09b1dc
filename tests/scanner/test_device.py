"""The device path of a scan, run on CPU tensors: the same state as the compiled loops, few bytes moved, one wait."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from fake_device import FakeDevices
from memlens.corpus.sentences import ScanSentence
from memlens.errors import ModelError
from memlens.models.groups import RoutedBlock
from memlens.models.load import load
from memlens.models.memory_model import MemoryModel
from memlens.scanner import device, scan
from memlens.scanner.kernels import BUCKETS, UNIT
from memlens.scanner.scan import ScanBatch, Scanner, bos_to_feed, plan_batches
from memlens.scanner.state import ScanState
from memlens.settings import ScanSettings
from memlens.testing import FAMILIES, MIXTURES, tiny_model, tiny_tokenizer

DEFAULT = ("gpt2", "llama", "qwen2_moe", "gpt_oss", "deepseek_v3")  # plain, gated, and experts of three kinds
ALL = [pytest.param(f, marks=() if f in DEFAULT else pytest.mark.sweep) for f in (*FAMILIES, *MIXTURES)]
# by default a mixture with dense, shared and routed memories
MODELS = ["qwen2_moe", *(pytest.param(family, marks=pytest.mark.sweep) for family in ("gpt2", "llama", "mixtral"))]


@pytest.fixture(autouse=True)
def few_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read only the first batch on the CPU."""
    monkeypatch.setattr(scan, "FIRST_PREFIXES", 100)
    monkeypatch.setattr(scan, "FIRST_PREFIXES_PER_TRIGGER", 0)


def make_settings(**options: Any) -> ScanSettings:
    return ScanSettings(**({"top": 7, "batch_tokens": 150, "sample_every": 3, "seed": 4, "bos": "no"} | options))


def make_batches(model: MemoryModel, settings: ScanSettings, sentences: int = 120) -> list[ScanBatch]:
    random = np.random.default_rng(0)
    texts = [
        ScanSentence(i, random.integers(0, 97, random.integers(3, 31)), int(random.integers(0, 3)))
        for i in range(sentences)
    ]
    return plan_batches(0, texts, settings, bos_to_feed(model, settings))


def scan_compiled(model: MemoryModel, settings: ScanSettings, batches: list[ScanBatch]) -> ScanState:
    """Scan through the compiled loops. Experts are run as on the device path, which the last bits of m depend on."""
    state = ScanState.start(model, range(len(model.layers)), settings)
    scanner = Scanner(model, settings, state)
    for _, _, batch, fresh_from in batches:
        candidates = scanner._candidates(batch, fresh_from)

        def update(layer: int, block: Any, candidates: Any = candidates) -> None:
            for part in block.split() if isinstance(block, RoutedBlock) else [block]:
                state.layers[layer].update(part, candidates)

        is_copied = state.prefixes < scan.FIRST_PREFIXES
        with torch.inference_mode(), scan._use_threads(settings.threads), model.watch(update, split=is_copied):
            model.run_body(torch.from_numpy(batch.tokens))
        state.prefixes += len(candidates.rows)
    return state


def scan_on_device(model: MemoryModel, settings: ScanSettings, batches: list[ScanBatch]) -> ScanState:
    state = ScanState.start(model, range(len(model.layers)), settings)
    Scanner(model, settings, state, on_device=True).scan(batches)
    return state


def assert_same_state(actual: ScanState, expected: ScanState) -> None:
    for layer, own in expected.layers.items():
        arrays = actual.layers[layer].arrays()
        for name, array in own.arrays().items():
            if name == "totals.total":
                # the compiled loops round a sum to float32 in each sentence, this path in each strip
                largest = np.maximum(abs(own.totals.highest), abs(own.totals.lowest))
                bound = expected.prefixes * (largest * 2.0**-22 / UNIT + 0.01)
                assert (abs(arrays[name] - array) <= bound).all(), name
            elif name.endswith(".positions"):
                filled = own.arrays()[name.replace("positions", "filled")] if "examples" not in name else None
                is_used = slice(None) if filled is None else np.arange(array.shape[1]) < filled[:, None]
                np.testing.assert_array_equal(arrays[name][is_used], array[is_used], err_msg=f"{layer} {name}")
            else:
                assert arrays[name].tobytes() == array.tobytes(), f"{layer} {name}"


@pytest.mark.parametrize("family", ALL)
def test_a_device_keeps_what_the_compiled_loops_keep(family: str) -> None:
    model = load(tiny_model(family), tokenizer=tiny_tokenizer())
    for options in ({}, {"per_sentence": "all", "bottom": "yes"}):
        settings = make_settings(**options)
        batches = make_batches(model, settings)
        assert_same_state(scan_on_device(model, settings, batches), scan_compiled(model, settings, batches))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", MODELS)
def test_numbers_of_other_dtypes_are_compared_as_float32(family: str, dtype: torch.dtype) -> None:
    model = load(tiny_model(family).to(dtype), tokenizer=tiny_tokenizer(), prove=False)
    settings = make_settings()
    batches = make_batches(model, settings)
    assert_same_state(scan_on_device(model, settings, batches), scan_compiled(model, settings, batches))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("per_sentence", ["best", "all"])
def test_buffers_that_overflow_lose_nothing(family: str, per_sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = load(tiny_model(family), tokenizer=tiny_tokenizer()), make_settings(per_sentence=per_sentence)
    batches, runs = make_batches(model, settings), list[int]()
    monkeypatch.setattr(device, "_ROOM", 8)
    run = device.DeviceScan._run

    def count_runs(self: Any, batch: Any, again: Any = ()) -> Any:
        runs.append(len(again))
        return run(self, batch, again)

    monkeypatch.setattr(device.DeviceScan, "_run", count_runs)
    assert_same_state(scan_on_device(model, settings, batches), scan_compiled(model, settings, batches))
    assert any(runs) and not all(runs)  # some layers of some batches were run again


@pytest.mark.parametrize("family", MODELS)
def test_thresholds_that_are_eight_batches_old_lose_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = load(tiny_model(family), tokenizer=tiny_tokenizer()), make_settings()
    batches, calls = make_batches(model, settings), Counter[int]()
    take = device.Source.take_thresholds

    def take_every_eighth(self: device.Source) -> None:
        if calls[id(self)] % 8 == 0:
            take(self)
        calls[id(self)] += 1

    monkeypatch.setattr(device.Source, "take_thresholds", take_every_eighth)
    monkeypatch.setattr(device, "_WAITING", 8)
    assert_same_state(scan_on_device(model, settings, batches), scan_compiled(model, settings, batches))
    assert max(calls.values()) > 10


@pytest.mark.parametrize("family", MODELS)
def test_lists_may_be_empty_at_first(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "FIRST_PREFIXES", 0)
    model, settings = load(tiny_model(family), tokenizer=tiny_tokenizer()), make_settings()
    batches = make_batches(model, settings)
    assert_same_state(scan_on_device(model, settings, batches), scan_compiled(model, settings, batches))


def test_a_scan_can_be_saved_between_batches_and_resumed() -> None:
    model, settings = load(tiny_model("llama"), tokenizer=tiny_tokenizer()), make_settings()
    batches = make_batches(model, settings)
    state, layers = ScanState.start(model, range(3), settings), range(3)
    scanner = Scanner(model, settings, state, on_device=True)
    saved: list[dict[str, np.ndarray]] = []

    def save(_batch: object) -> None:
        scanner.complete()
        saved.append({name: array.copy() for name, array in state.arrays().items()})

    scanner.scan(batches, save)
    for number in (1, 5):
        resumed = ScanState.start(model, layers, settings)
        resumed.restore_(saved[number])
        Scanner(model, settings, resumed, on_device=True).scan(batches[number + 1 :])
        for name, array in state.arrays().items():
            if not name.endswith("positions"):  # those of removed entries remain
                assert resumed.arrays()[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(("bad", "words"), [(np.nan, "L1N5 .* NaN"), (np.inf, "L1N5"), (1e20, "beyond 1e12")])
def test_coefficients_that_cannot_be_summed_are_rejected(bad: float, words: str) -> None:
    model, settings = load(tiny_model("gpt2"), tokenizer=tiny_tokenizer()), make_settings()

    def spoil(coefficients: torch.Tensor, _group: object) -> torch.Tensor:
        if len(batches_seen) < 5:  # after the first batch, which is read on the CPU
            batches_seen.append(0)
            return coefficients
        changed = coefficients.clone()
        changed[0, 1, 5] = bad
        return changed

    batches_seen: list[int] = []
    with model.edit({1: spoil}), pytest.raises(ModelError, match=words):
        scan_on_device(model, settings, make_batches(model, settings))


def test_first_places_are_the_same_without_torchs_own_function() -> None:
    mask = torch.from_numpy(np.random.default_rng(3).random(100) < 0.2)
    expected = mask.nonzero()[:, 0].tolist()
    for count in (3, len(expected), 40):
        padded = (expected + [-1] * 40)[:count]
        assert device.first_places(mask, count).tolist() == padded
        assert device._first_places_by_sums(mask, count).tolist() == padded


# --- on a fake device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MODELS)
def test_a_device_waits_once_per_batch_and_has_no_float64(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, tokenizer = make_settings(), tiny_tokenizer()
    expected_model = load(tiny_model(family), tokenizer=tokenizer, prove=False)
    batches = make_batches(expected_model, settings)
    expected = scan_on_device(expected_model, settings, batches)
    waits, run_batch = list[int](), device.DeviceScan._run

    def count_waits(self: Any, batch: Any, *again: Any) -> Any:
        before = FakeDevices.waits
        self.model.run_body(batch.tokens)
        of_model = FakeDevices.waits - before  # the masks of transformers wait for the device
        received = run_batch(self, batch, *again)
        waits.append(FakeDevices.waits - before - 2 * of_model)
        return received

    monkeypatch.setattr(device.DeviceScan, "_run", count_waits)
    with FakeDevices():
        model = load(tiny_model(family).to("mps"), tokenizer=tokenizer, prove=False)
        actual = scan_on_device(model, settings, batches)
    assert_same_state(actual, expected)
    assert set(waits) == {1}


@pytest.mark.parametrize("family", MODELS)
def test_layers_on_two_devices_give_the_same_bytes(family: str) -> None:
    settings, tokenizer = make_settings(), tiny_tokenizer()
    expected_model = load(tiny_model(family), tokenizer=tokenizer, prove=False)
    batches = make_batches(expected_model, settings)
    expected = scan_on_device(expected_model, settings, batches)
    with FakeDevices():
        network = tiny_model(family)
        inner, last = network.base_model_prefix, network.get_output_embeddings()
        places = {name: "mps:1" for name, child in network.named_children() if child is last}
        seen_layers = False
        for name, child in network.base_model.named_children():
            if isinstance(child, torch.nn.ModuleList):
                places |= {f"{inner}.{name}.{i}": f"mps:{int(i > 0)}" for i in range(len(child))}
                seen_layers = True
            else:
                places[f"{inner}.{name}"] = f"mps:{int(seen_layers)}"
        model = load(dispatch_model(network, places, force_hooks=True), tokenizer=tokenizer)
        assert [layer.groups[0].values.device.index for layer in model.layers] == [0, 1, 1]
        actual = scan_on_device(model, settings, batches)
    for (name, array), other in zip(actual.arrays().items(), expected.arrays().values(), strict=True):
        assert array.tobytes() == other.tobytes(), name


# --- passes over the block --------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.is_counting = 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        if not self.is_counting or any(one.alias_info is not None and not one.alias_info.is_write for one in returned):
            return output  # a view moves nothing
        outputs = [one for one in (output if isinstance(output, (tuple, list)) else [output]) if torch.is_tensor(one)]
        inputs = list(tensors_of([*args, *(kwargs or {}).values()]))
        written = sum(one.nbytes for one in outputs)
        if any(name in str(func) for name in ("index_select", "aten.index.", "embedding")):
            self.bytes += 2 * written + sum(one.nbytes for one in inputs[1:])  # reads only the selected rows
        else:
            self.bytes += written + sum(
                one.untyped_storage().nbytes() if 0 in one.stride() else one.nbytes for one in inputs
            )
        return output


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if torch.is_tensor(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def compiled_bytes(arguments: Any) -> int:
    """Return the bytes that strip_statistics reads and writes after fusion, by the count of torch.compile."""
    counts = list[int]()

    class CountedError(Exception):
        pass

    def count(graph: GraphLowering) -> None:
        graph._update_scheduler()
        counts.append(graph.count_bytes()[0])
        raise CountedError

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InductorError, match="CountedError"):
        patch.setattr(GraphLowering, "codegen", count)
        torch.compile(device.strip_statistics, dynamic=False, options=device.FUSION)(*arguments)
    return counts[0]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("gpt2", {"n_inner": 1024}), ("llama", {"intermediate_size": 1024}), ("mixtral", {"intermediate_size": 512})],
)
def test_a_layer_takes_at_most_eight_passes_over_its_block(
    family: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, traffic = make_settings(top=50), Traffic()
    monkeypatch.setattr(device, "_ROOM", 64)  # the block of a large model is 20 times as large
    model = load(tiny_model(family, **sizes).to(torch.bfloat16), tokenizer=tiny_tokenizer(), prove=False)
    state, layer = ScanState.start(model, [1], settings), model.layers[1]
    source = device.Source(state.layers[1], layer.groups)
    count = 4096 * (2 if source.is_routed else 1)
    block = torch.randn(count, source.size).to(torch.bfloat16)
    gates = torch.randn(count, source.size).to(torch.bfloat16) if source.gated else None
    keys = torch.arange(count) % (source.experts * BUCKETS)
    source.take_thresholds()
    source.thresholds[:, :-1] = 3.5  # few coefficients reach it
    keeps_bottom = state.layers[1].triggers.keeps_bottom
    with torch.inference_mode(), traffic:
        strips = device.make_strips(keys, source.experts * BUCKETS, device.ROWS)
        traffic.is_counting = False
        arguments = block, gates, strips, source.thresholds, keeps_bottom
        statistics = device.strip_statistics(*arguments)
        traffic.is_counting = True
        source.add(statistics, strips)
        source.find_hits(block, gates, statistics.reaches, strips, torch.arange(count))
    assert (traffic.bytes + compiled_bytes(arguments)) / block.nbytes <= 8


@pytest.mark.sweep
def test_the_compiled_statistics_are_those_of_plain_torch() -> None:
    torch._dynamo.reset()
    assert device.compile_reader(torch.device("cpu")) is not None  # it compares both


def test_without_a_compiler_plain_torch_computes_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    assert device.compile_reader(torch.device("cpu")) is None
    assert device.strip_reader(torch.device("cpu")) is device.strip_statistics
