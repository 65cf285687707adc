import math

import pytest
import torch

from h3kv.core.errors import ConfigError
from h3kv.models.rope import RopeKind, RopeScaling, Rotary, inverse_frequencies, ntk_theta


def rotary(scaling: RopeScaling) -> Rotary:
    return Rotary(head_dim=8, theta=100.0, scaling=scaling, device=torch.device("cpu"))


def test_rows_are_cosines_and_sines_of_the_positions_asked_for() -> None:
    rows = rotary(RopeScaling()).rows(5, 3)
    angles_TR = torch.tensor([[p * 100.0 ** (-2 * r / 8) for r in range(4)] for p in (5, 6, 7)])
    torch.testing.assert_close(rows.cos_TR, angles_TR.cos())
    torch.testing.assert_close(rows.sin_TR, angles_TR.sin())
    assert rows.cos_TR.is_contiguous()
    assert rows.sin_TR.is_contiguous()


def test_rows_do_not_depend_on_how_positions_are_cut() -> None:
    scaling = RopeScaling(kind=RopeKind.YARN, factor=4.0, original_context=64)
    whole, tail = rotary(scaling).rows(0, 20), rotary(scaling).rows(13, 7)
    assert torch.equal(whole.cos_TR[13:], tail.cos_TR)
    assert torch.equal(whole.sin_TR[13:], tail.sin_TR)


def test_linear_scaling_divides_every_frequency() -> None:
    plain_R, _ = inverse_frequencies(16, 1e4, RopeScaling())
    scaled_R, amplitude = inverse_frequencies(16, 1e4, RopeScaling(kind=RopeKind.LINEAR, factor=4.0))
    torch.testing.assert_close(scaled_R, plain_R / 4)
    assert amplitude == 1.0


def test_ntk_keeps_the_fastest_pair_and_stretches_the_slowest_by_the_factor() -> None:
    plain_R, _ = inverse_frequencies(16, 1e4, RopeScaling())
    scaled_R, _ = inverse_frequencies(16, 1e4, RopeScaling(kind=RopeKind.NTK, factor=4.0))
    assert scaled_R[0] == plain_R[0]
    torch.testing.assert_close(scaled_R[-1], plain_R[-1] / 4)
    assert ntk_theta(16, 1e4, 1.0) == 1e4


def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_raises_the_amplitude() -> None:
    scaling = RopeScaling(kind=RopeKind.YARN, factor=8.0, original_context=4096)
    plain_R, _ = inverse_frequencies(64, 1e4, RopeScaling())
    scaled_R, amplitude = inverse_frequencies(64, 1e4, scaling)
    assert scaled_R[0] == plain_R[0]
    torch.testing.assert_close(scaled_R[-1], plain_R[-1] / 8)
    assert amplitude == pytest.approx(0.1 * math.log(8.0) + 1.0)


def test_yarn_takes_a_given_amplitude() -> None:
    scaling = RopeScaling(kind=RopeKind.YARN, factor=8.0, original_context=4096, attention_factor=0.9)
    assert inverse_frequencies(64, 1e4, scaling)[1] == 0.9


@pytest.mark.parametrize("kind", [RopeKind.YARN, RopeKind.LLAMA3])
def test_kinds_that_need_the_original_context_name_it(kind: RopeKind) -> None:
    with pytest.raises(ConfigError, match="original_context"):
        inverse_frequencies(64, 1e4, RopeScaling(kind=kind, factor=2.0))


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"factor": 0.5}, "rope.factor"),
        ({"factor": math.inf}, "rope.factor"),
        ({"original_context": 0}, "rope.original_context"),
        ({"low_freq_factor": 4.0}, "rope.high_freq_factor"),
        ({"beta_fast": 1.0}, "rope.beta_fast"),
    ],
)
def test_numbers_out_of_range_are_refused_by_field(numbers: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RopeScaling(kind=RopeKind.YARN, **numbers)
    assert caught.value.field == field
