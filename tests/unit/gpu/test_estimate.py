"""Estimates of small models, beside what can be counted by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import gpu
from penstock.errors import ConfigError
from penstock.gpu.estimates import Growth
from penstock.gpu.trace.traced_steps import trace_steps
from support.models import KIB, MIB, Attends, Chain, Pairs, sequences, vectors

NOTHING: dict[str, str] = {}
"""No environment: what the machine sets must not move a test."""


def one(make_model: object, make_batch: object, n: int, **more: object) -> gpu.Estimate:
    return gpu.estimate(make_model, make_batch, [n], environment=NOTHING, **more)[0]  # type: ignore[arg-type]


def test_components_are_what_can_be_counted_by_hand() -> None:
    found = one(Chain, vectors, 4096)
    weights = 4 * 4 * MIB
    assert found.components["parameters"] == weights
    assert found.components["optimizer_state"] == 2 * weights
    assert found.components["inputs"] == 16 * MIB
    assert found.components["workspaces"] == 2 * 32 * MIB
    # Of four outputs that were kept, the last is gone when most is there: two gradients have come.
    assert found.components["activations"] == pytest.approx(3 * 16 * MIB, abs=KIB)
    assert found.components["temporaries"] == pytest.approx(2 * 16 * MIB, abs=KIB)
    assert found.peak_phase == "backward"
    assert sum(found.components.values()) == found.device_bytes
    assert found.allocated_bytes <= found.reserved_bytes <= found.device_bytes


def test_without_a_batch_to_speak_of_the_optimizer_step_is_the_peak() -> None:
    found = one(Chain, vectors, 1)
    weights = 16 * MIB
    assert found.peak_phase == "optimizer"
    # AdamW over many tensors at once keeps the roots of all second moments while it divides.
    assert found.allocated_bytes == pytest.approx(5 * weights + 64 * MIB, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_value"),
    [("adamw", 8.0), ("adam", 8.0), ("sgd", 0.0), ("sgd-momentum", 4.0), ("adamw-8bit", 2 + 8 / 256)],
)
def test_optimizers_keep_the_state_they_are_known_for(optimizer: str, bytes_per_value: float) -> None:
    found = one(Chain, vectors, 4096, optimizer=optimizer)
    assert found.components["optimizer_state"] == 4 * MIB * bytes_per_value


def test_an_optimizer_may_be_a_function_and_takes_its_form_for_many_tensors() -> None:
    given = one(Chain, vectors, 1, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
    assert given.allocated_bytes == one(Chain, vectors, 1).allocated_bytes
    slow = one(Chain, vectors, 1, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=False))
    assert slow.allocated_bytes < given.allocated_bytes


def test_attention_keeps_a_number_a_row_not_every_probability() -> None:
    found = one(Attends, sequences, 8, precision="bf16")
    probabilities = 8 * 4 * 2048 * 2048 * 2
    assert found.components["activations"] < probabilities / 4
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = one(Attends, sequences, 8, precision="bf16")
    assert plain.components["activations"] > 2 * probabilities


def test_a_mask_whose_rows_are_not_contiguous_sends_attention_to_plain_arithmetic() -> None:
    class Biased(Attends):
        def __init__(self, transposed: bool) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4, 2048, 2048))
            self.transposed = transposed

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.inward(x).chunk(3, dim=-1))
            bias = self.bias.transpose(1, 2) if self.transposed else self.bias
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).sum()

    probabilities = 8 * 4 * 2048 * 2048 * 4
    assert one(lambda: Biased(True), sequences, 8).components["activations"] > probabilities
    assert one(lambda: Biased(False), sequences, 8).components["activations"] < probabilities / 4


def test_dropout_keeps_one_byte_a_value() -> None:
    def model(*more: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 1024, bias=False), *more)

    with_it, without = (one(make, vectors, 8192) for make in (lambda: model(nn.Dropout(0.5)), model))
    grown = with_it.components["activations"] - without.components["activations"]
    assert grown == pytest.approx(8192 * 1024, rel=0.01)


def test_autocast_halves_what_is_kept_and_casts_every_weight_once() -> None:
    class Twice(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + super().forward(x)

    training = gpu.TrainingSetup(make_model=Twice, make_batch=vectors, precision="bf16")
    trace, _ = trace_steps(training, [4096, 4096], gpu.Card())
    step = trace.steps[1]
    made = [n for n in trace.events[step.first : step.end] if n > 0 and trace.phases[n] == "forward"]
    assert [trace.sizes[n] for n in made if trace.makers[n] == "aten::tanh"] == [8 * MIB] * 8
    assert [trace.sizes[n] for n in made if trace.makers[n] == "aten::_to_copy"].count(2 * MIB) == 4
    full, half = one(Chain, vectors, 4096), one(Chain, vectors, 4096, precision="bf16")
    assert half.components["parameters"] == full.components["parameters"]
    assert half.components["activations"] < full.components["activations"]


def test_true_half_precision_halves_parameters_too() -> None:
    found = one(Chain, vectors, 4096, precision="bf16-true")
    assert found.components["parameters"] == 8 * MIB
    assert found.components["optimizer_state"] == 16 * MIB


def test_gradients_that_meet_are_summed_in_place() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1024, 1024, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return (torch.sin(x) + torch.cos(x) + torch.tanh(x)).pow(2).sum()

    training = gpu.TrainingSetup(make_model=Residual, make_batch=vectors, optimizer="sgd")
    trace, _ = trace_steps(training, [256, 256], gpu.Card())
    made = list(zip(trace.makers, trace.phases, strict=True))
    assert ("aten::cos", "forward") in made
    assert ("aten::add", "backward") not in made


def test_checkpointing_of_like_blocks_keeps_their_inputs_only() -> None:
    def deep() -> nn.Module:
        class Block(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(*[part for _ in range(3) for part in (nn.Linear(1024, 1024), nn.Tanh())])

        return nn.Sequential(*[Block() for _ in range(8)])

    plain, saving = (one(deep, vectors, 8192, checkpointing=on) for on in (False, True))
    assert saving.components["activations"] < 0.6 * plain.components["activations"]
    assert saving.reserved_bytes < plain.reserved_bytes


def test_checkpointed_blocks_are_computed_again_in_the_precision_of_autocast() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(2)])

    training = gpu.TrainingSetup(make_model=deep, make_batch=vectors, precision="bf16", checkpointing=True)
    trace, _ = trace_steps(training, [4096, 4096], gpu.Card())
    again = [
        size
        for size, maker, phase in zip(trace.sizes, trace.makers, trace.phases, strict=True)
        if maker == "aten::tanh" and phase == "backward"
    ]
    assert again and set(again) == {8 * MIB}


def test_a_sweep_gives_what_each_batch_size_gives_alone() -> None:
    sizes = [100, 256, 1000, 3000]
    swept = gpu.estimate(Chain, vectors, sizes, precision="bf16", environment=NOTHING)
    for size, found in zip(sizes, swept, strict=True):
        alone = one(Chain, vectors, size, precision="bf16")
        assert found.batch_size == size
        assert (found.allocated_bytes, found.reserved_bytes) == (alone.allocated_bytes, alone.reserved_bytes)
        assert found.components == alone.components


def test_parts_that_grow_with_the_batch_are_separated_from_constant_ones() -> None:
    growth = gpu.estimate(Chain, vectors, [4096, 8192], environment=NOTHING)[0].growth
    assert not growth["parameters"].grows and growth["parameters"].fixed_bytes == 16 * MIB
    assert growth["activations"].per_sample_bytes == 3 * 4096
    assert growth["inputs"].per_sample_bytes == 4096
    assert "12.0 KiB × batch" in str(growth["activations"])


def test_a_loss_over_pairs_grows_with_the_square_of_the_batch() -> None:
    swept = gpu.estimate(Pairs, vectors, [2048, 4096, 8192], environment=NOTHING)
    alone = one(Pairs, vectors, 4096)
    assert swept[1].allocated_bytes == pytest.approx(alone.allocated_bytes, rel=0.001)


def test_a_model_that_takes_another_path_for_other_batch_sizes_is_traced_for_each() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inward = nn.Linear(1024, 1024)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inward(x)
            return (x.exp().sin() if len(x) > 3000 else x).sum()

    swept = gpu.estimate(Fickle, vectors, [2048, 4096], environment=NOTHING)
    assert swept[0].growth == {}
    assert [found.allocated_bytes for found in swept] == [one(Fickle, vectors, n).allocated_bytes for n in (2048, 4096)]


def test_accumulation_keeps_activations_of_one_part_only() -> None:
    whole, parts = one(Chain, vectors, 4096), one(Chain, vectors, 1024, accumulation=4)
    assert parts.components["activations"] == pytest.approx(whole.components["activations"] / 4, abs=KIB)


def test_a_step_of_ones_own_takes_the_place_of_the_usual_one() -> None:
    def step(model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    own = one(Chain, vectors, 4096, step=step)
    assert own.components["activations"] == one(Chain, vectors, 4096, precision="bf16").components["activations"]


def test_batches_may_be_tensors_tuples_or_mappings_and_losses_may_hide_in_outputs() -> None:
    class Named(Chain):
        def forward(self, *, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x) + y.sum(), "rest": x}

    class Paired(Chain):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x) + y.sum(), x

    plain = one(Chain, vectors, 4096)
    named = one(Named, lambda n: {"x": vectors(n), "y": torch.zeros(n)}, 4096)
    paired = one(Paired, lambda n: (vectors(n), torch.zeros(n)), 4096)
    assert named.components["activations"] == paired.components["activations"] == plain.components["activations"]


def test_models_and_batches_that_ask_for_cuda_need_none() -> None:
    class There(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.cuda()

    found = one(lambda: There().to("cuda:0"), lambda n: torch.zeros(n, 1024, device="cuda"), 4096)
    assert found.allocated_bytes == one(Chain, vectors, 4096).allocated_bytes


def test_a_batch_that_needs_values_is_made_for_real_and_moved() -> None:
    def batch(n: int) -> torch.Tensor:
        return torch.tensor([[float(i)] * 1024 for i in range(n)]).reshape(int(torch.tensor(n).item()), 1024)

    assert one(Chain, batch, 64).components["inputs"] == 64 * 4096


def test_a_recurrent_layer_keeps_its_gates() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LSTM(256, 256, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0].sum()

    found = one(Recurrent, lambda n: torch.zeros(n, 128, 256), 64)
    layer_bytes = 64 * 128 * 256 * 4
    # Six for the gates, the cell and the output of each layer but one, and the output itself.
    assert found.components["activations"] == pytest.approx((6 * 2 - 1 + 1) * layer_bytes, rel=0.01)
    assert found.reserved_range[0] < 0.95 * found.reserved_bytes, "cuDNN's workspace is a guess"


def test_a_recurrent_layers_dropout_costs_a_bit_a_value_and_its_random_numbers() -> None:
    class Recurrent(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.layers = nn.GRU(256, 256, num_layers=3, dropout=dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)[0].sum()

    def parts(dropout: float) -> dict[str, int]:
        return one(lambda: Recurrent(dropout), lambda n: torch.zeros(128, n, 256), 64).components

    dropped, kept = parts(0.1), parts(0.0)
    assert dropped["activations"] - kept["activations"] == 2 * 64 * 128 * 256 // 8
    assert dropped["workspaces"] - kept["workspaces"] == 132 * 2048 * 24


class Layered(nn.Module):
    """A recurrent layer as models use it."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].sum()


def steps(n: int) -> torch.Tensor:
    return torch.zeros(n, 32, 64)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true", "fp16-true"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(64, 48, proj_size=16, batch_first=True),
        lambda: nn.LSTM(64, 48, num_layers=2, bidirectional=True),
        lambda: nn.GRU(64, 48, bias=False, batch_first=True),
        lambda: nn.RNN(64, 48, dropout=0.3, num_layers=3, nonlinearity="relu"),
    ],
)
def test_recurrent_layers_of_every_kind_are_estimated(make: Callable[[], nn.RNNBase], precision: str) -> None:
    found = gpu.estimate(lambda: Layered(make()), steps, [1, 64], precision=precision, environment=NOTHING)
    assert found[0].allocated_bytes < found[1].allocated_bytes
    assert found[1].growth, "steps of one sample and of many are alike"


def test_packed_sequences_are_estimated() -> None:
    class Packed(Layered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, [32] * len(x), batch_first=True)
            return self.layer(packed)[0].data.sum()

    assert one(lambda: Packed(nn.LSTM(64, 64, batch_first=True)), steps, 8).allocated_bytes > 8 * 32 * 64 * 4


def test_a_recurrent_layer_may_run_while_its_model_is_made() -> None:
    class Curious(Layered):
        def __init__(self) -> None:
            super().__init__(nn.GRU(64, 48, dropout=0.1, num_layers=2))
            self.width = self.layer(steps(2))[0].shape[-1]

    assert one(Curious, steps, 8).allocated_bytes > 0


def test_layers_that_share_a_weight_keep_both_their_blocks() -> None:
    class Both(nn.Module):
        def __init__(self, is_shared: bool) -> None:
            super().__init__()
            self.first, self.second = nn.GRU(64, 64), nn.GRU(64, 64)
            if is_shared:
                self.second.weight_hh_l0 = self.first.weight_hh_l0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first(x)[0] + self.second(x)[0]).sum()

    apart, shared = (one(lambda is_shared=is_shared: Both(is_shared), steps, 8) for is_shared in (False, True))
    assert shared.components["parameters"] >= apart.components["parameters"]


def test_a_frozen_layer_in_evaluation_keeps_nothing() -> None:
    class Taught(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.teacher = nn.LSTM(64, 64, num_layers=layers)
            self.out = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.teacher.eval()
            with torch.no_grad():
                x = self.teacher(x)[0]
            return self.out(x).sum()

    one_layer, four = (one(lambda layers=layers: Taught(layers), steps, 256) for layers in (1, 4))
    assert one_layer.components["activations"] == four.components["activations"]


def test_a_convolutions_workspace_is_a_guess_and_widens_the_range() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))

    unsure, sure = one(model, lambda n: torch.zeros(n, 3, 128, 128), 16), one(Chain, vectors, 4096)
    width = [found.reserved_range[1] / found.reserved_range[0] for found in (unsure, sure)]
    assert width[0] > 1.2 * width[1]
    for found in (unsure, sure):
        assert found.reserved_range[0] <= found.reserved_bytes <= found.reserved_range[1]
        assert found.allocated_range[0] <= found.allocated_bytes <= found.allocated_range[1]


def test_the_cards_kind_and_the_environment_set_the_workspaces() -> None:
    ampere = one(Chain, vectors, 4096, capability=(8, 0))
    assert ampere.components["workspaces"] == 2 * (8 * MIB + (128 << 10))
    found = gpu.estimate(Chain, vectors, [64], environment={"CUBLAS_WORKSPACE_CONFIG": ":16:8"})[0]
    assert found.components["workspaces"] == 2 * 16 * 8 * 1024


def test_the_allocators_settings_are_honoured() -> None:
    usual = one(Chain, vectors, 2200)
    conf = {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:2"}
    rounded = gpu.estimate(Chain, vectors, [2200], environment=conf)[0]
    assert rounded.allocated_bytes > usual.allocated_bytes
    assert rounded.components["activations"] == usual.components["activations"]


def test_an_estimate_says_whether_it_fits() -> None:
    least = one(Chain, vectors, 4096)
    roomy, tight = (
        gpu.estimate(Chain, vectors, [4096], device_memory=least.device_bytes + more, environment=NOTHING)[0]
        for more in (MIB, -400 * MIB)
    )
    assert (least.fits, roomy.fits, tight.fits) == (None, True, False)


def test_a_mask_that_is_looked_into_is_taken_for_unpadded_and_that_is_said() -> None:
    class Looks(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = x[:, 0] == 0
            return super().forward(x) if mask.all() and not torch.isinf(x).any() else x.exp().sum()

    found = one(Looks, vectors, 64)
    assert found.components["activations"] == one(Chain, vectors, 64).components["activations"]
    assert len(found.assumptions) == 2 and all("mask.all()" in line for line in found.assumptions)


def test_torch_is_left_as_it_was() -> None:
    code = """
import torch, warnings
from penstock import gpu
before = (torch.autocast.__init__, torch.autocast.__exit__, torch.amp.is_autocast_available("cuda"))
state = torch.get_rng_state()
gpu.estimate(lambda: torch.nn.Linear(8, 8), lambda n: torch.zeros(n, 8), [4], precision="fp16")
assert before == (torch.autocast.__init__, torch.autocast.__exit__, torch.amp.is_autocast_available("cuda"))
assert not torch.is_autocast_enabled("cuda") and torch.equal(state, torch.get_rng_state())
assert torch.zeros(1).device.type == "cpu" and not torch.cuda.is_initialized()
model = torch.nn.Linear(8, 8)
model(torch.zeros(2, 8)).sum().backward()
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=120)


def test_a_model_larger_than_this_machine_is_estimated() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(*[nn.Linear(32_768, 32_768, bias=False) for _ in range(64)])

    found = one(huge, lambda n: torch.zeros(n, 32_768), 8, precision="bf16")
    assert found.components["parameters"] == 64 * 4 * 32_768**2


def fails() -> nn.Module:
    raise FileNotFoundError("weights.bin is missing")


class FailsLater(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, :7])


class AsksForValues(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


class Wrong:
    pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"make_model": fails}, r"make_model\(\) failed: FileNotFoundError: weights.bin is missing"),
        ({"make_model": FailsLater}, "the training step failed: RuntimeError"),
        ({"make_model": AsksForValues}, r"asks for a tensor's values.*test_estimate.py.*item\(\)"),
        ({"make_model": Wrong}, "returned Wrong, not a torch.nn.Module"),
        ({"make_model": nn.Linear(2, 2)}, "make_model must be a function"),
        ({"make_batch": lambda n: torch.zeros(n, 1024, device="xpu")}, r"make_batch\(\d+\) failed"),
        ({"make_batch": lambda n: {"text": "no tensor"}}, "without a tensor"),
        ({"batch_sizes": [0]}, "batch size 0 is not a whole number of 1 or more"),
        ({"batch_sizes": []}, "not a list of batch sizes"),
        ({"batch_sizes": 8}, "not a list of batch sizes"),
        ({"optimizer": "adamax9"}, "optimizer='adamax9' is not known; write one of adam, adamw"),
        ({"precision": "int3"}, "precision='int3' is not known"),
        ({"accumulation": 0}, "accumulation=0 must be 1 or more"),
        ({"checkpointing": True, "make_model": lambda: nn.Linear(1024, 1)}, "no list of blocks of one"),
        ({"device_memory": "a lot"}, "device_memory='a lot' is not a size"),
        ({"capability": (1, 0)}, "not a compute capability"),
    ],
)
def test_arguments_that_cannot_work_are_one_clear_error(arguments: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"make_model": Chain, "make_batch": vectors, "batch_sizes": [8], "environment": NOTHING}
    with pytest.raises(ConfigError, match=said):
        gpu.estimate(**{**given, **arguments})  # type: ignore[arg-type]


def test_an_explanation_names_every_part_with_its_growth() -> None:
    text = one(Chain, vectors, 4096).explain()
    assert "batch size 4096" in text and "backward pass" in text
    assert "optimizer state" in text and "× batch" in text


def test_a_part_that_shrinks_with_the_batch_has_one_sign() -> None:
    growth = [Growth(fixed_bytes=300 << 20, per_sample_bytes=float(each)) for each in (137 << 20, -137 << 20, 0)]
    assert [str(each) for each in growth] == ["300 MiB + 137 MiB × batch", "300 MiB - 137 MiB × batch", "300 MiB"]
    assert [each.change for each in growth] == ["+ 137 MiB per sample", "- 137 MiB per sample", "no"]
