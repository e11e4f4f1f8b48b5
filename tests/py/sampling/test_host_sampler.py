"""The sampling kernel equals a plain reference in float64, with every instruction set."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexinfer.runtime.kernels import available_isas
from flexinfer.sampling import host_sampler
from flexinfer.sampling.host_sampler import draw_rows, sample_rows
from helpers.each_isa import each_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


isa = each_isa(host_sampler, available_isas())


def kept_probabilities(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """[vocab_size] float64: 0 for what is forbidden. Sorts; of equal logits keeps all or none."""
    scaled = logits.double() / temperature
    probs = scaled.softmax(0)
    probs[probs < min_p * probs.max()] = 0
    descending = logits.double().masked_fill(probs == 0, -math.inf).sort(descending=True).values
    if 0 < top_k < len(logits):
        probs[logits < descending[top_k - 1]] = 0
    probs /= probs.sum()
    if top_p < 1:
        values, which = logits.double().unique(return_inverse=True)
        mass = torch.zeros(len(values), dtype=torch.float64).index_add_(0, which, probs)
        above = mass.flip(0).cumsum(0).flip(0) - mass
        probs[above[which] >= top_p] = 0
        probs /= probs.sum()
    return probs


def draw_all(
    logits: torch.Tensor,
    numbers: list[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """The tokens of one row, one for each number."""
    count = len(numbers)
    rows = logits.expand(count, -1)
    lists = [temperature] * count, [top_k] * count, [top_p] * count, [min_p] * count
    return torch.tensor(draw_rows(rows, *lists, numbers))


@EXAMPLES
@given(
    vocab_size=st.one_of(st.integers(1, 300), st.sampled_from([1000, 4096, 32003])),
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.one_of(st.sampled_from([-1, 0, 1, 2, 20, 256]), st.integers(1, 2000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    decimals=st.sampled_from([0, 1, 6]),
    hidden=st.floats(0, 0.9),
    seed=st.integers(0, 99),
)
def test_tokens_are_those_of_the_inverse_distribution_function(
    isa: str,
    vocab_size: int,
    dtype: torch.dtype,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    decimals: int,
    hidden: float,
    seed: int,
) -> None:
    """Few decimals make ties. A number may fall on either side of a bound that it all but meets."""
    generator = torch.Generator().manual_seed(seed)
    logits = (2.5 * torch.randn(vocab_size, generator=generator)).round(decimals=decimals)
    logits[torch.rand(vocab_size, generator=generator) < hidden] = -math.inf
    logits[seed % vocab_size] = 1.0
    logits = logits.to(dtype)
    low, high = (
        kept_probabilities(logits, temperature, top_k, p, m)
        for p, m in ((top_p - 1e-6, min_p * (1 + 1e-5)), (top_p + 1e-6, min_p * (1 - 1e-5)))
    )
    if not torch.equal(low > 0, high > 0):
        return  # a threshold that rounding decides
    numbers = [*torch.rand(64, generator=generator, dtype=torch.float64).tolist(), 0.0]
    found = draw_all(logits, numbers, temperature, top_k, top_p, min_p)
    assert (low[found] > 0).all()
    ends = low.cumsum(0)
    target, slack = torch.tensor(numbers, dtype=torch.float64), 3e-6
    assert (target <= ends[found] + slack).all()
    assert (target >= ends[found] - low[found] - slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 128, 129, 8192, 130_001])
def test_frequencies_are_the_softmax(isa: str, vocab_size: int, dtype: torch.dtype) -> None:
    """Chi-squared over at most 50 classes of equal share: above the 1e-6 quantile is a defect."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(vocab_size).mul(2).to(dtype)
    probs = logits.double().softmax(0)
    num_samples, batch = 8000, 500
    lists = [1.0] * batch, [0] * batch, [1.0] * batch, [0.0] * batch
    rows = logits.expand(batch, -1)
    found = [
        token
        for first in range(0, num_samples, batch)
        for token in sample_rows(rows, *lists, [5] * batch, range(first, first + batch))
    ]
    classes = (probs.cumsum(0) * 50).long().clamp(max=49)
    expected = torch.zeros(50, dtype=torch.float64).index_add_(0, classes, probs) * num_samples
    counts = torch.bincount(classes[found], minlength=50)
    used = expected > 0
    assert not counts[~used].any()
    chi_squared = ((counts - expected)[used].square() / expected[used]).sum()
    freedom = int(used.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile at 4.75 standard deviations.
    bound = (
        freedom * (1 - 2 / (9 * freedom) + 4.75 * (2 / (9 * freedom)) ** 0.5) ** 3 if freedom else 0
    )
    assert chi_squared <= bound


def test_a_row_gives_the_same_token_in_every_batch(isa: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 5000)
    args = [1.0, 0.5] * 20, [0, 50] * 20, [0.9, 1.0] * 20, [0.0, 0.1] * 20
    seeds, counters = list(range(40)), list(range(100, 140))
    at_once = sample_rows(logits, *args, seeds, counters)
    one_by_one = [
        sample_rows(logits[i : i + 1], *([a[i]] for a in args), [seeds[i]], [counters[i]])[0]
        for i in range(40)
    ]
    assert at_once == one_by_one
    assert len(set(sample_rows(logits[:1].expand(40, -1), *args, seeds, [0] * 40))) > 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 20, 1000])
@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_rows_that_cannot_be_sampled_are_reported_alone(
    isa: str, dtype: torch.dtype, vocab_size: int, special: float
) -> None:
    logits = torch.zeros(4, vocab_size, dtype=dtype)
    logits[1] = -math.inf
    logits[2, vocab_size - 1] = special
    found = sample_rows(logits, [1.0] * 4, [0, 0, 3, 0], [1.0] * 4, [0.0] * 4, [0] * 4, [0] * 4)
    assert found[1] == found[2] == -1
    assert found[0] == found[3] >= 0


@pytest.mark.parametrize("vocab_size", [1, 129, 3000])
def test_without_a_temperature_the_first_of_the_largest_is_taken(isa: str, vocab_size: int) -> None:
    logits = torch.zeros(vocab_size)
    logits[vocab_size // 2 :] = 1
    assert draw_all(logits, [0.5], temperature=0.0).item() == vocab_size // 2


@pytest.mark.parametrize("temperature", [1e-38, 1e30])
def test_extreme_temperatures_are_the_argmax_and_the_uniform_distribution(
    isa: str, temperature: float
) -> None:
    logits = torch.tensor([0.0, 3.0, -math.inf, 1.0])
    found = set(draw_all(logits, [0.0, 0.4, 0.99], temperature).tolist())
    assert found == ({1} if temperature < 1 else {0, 1, 3})


@pytest.mark.parametrize("temperature", [1e30, 1e39])
def test_min_p_holds_at_the_largest_temperatures(isa: str, temperature: float) -> None:
    """1e39 is infinite in float32, and so many times log(1) is NaN."""
    logits = torch.full((1500,), -math.inf)
    logits[[500, 1400]] = torch.tensor([1.0, 0.0])
    found = draw_all(logits, [0.0, 0.4, 0.6, 0.99], temperature, min_p=1.0)
    assert set(found.tolist()) == {500}


@pytest.mark.parametrize("top_p", [1e-50, 1e-45, 1e-9])
def test_the_smallest_top_p_is_the_argmax(isa: str, top_p: float) -> None:
    """1e-50 is zero in float32: of no weight at all."""
    torch.manual_seed(0)
    for _ in range(100):
        logits = torch.randn(2000)
        assert draw_all(logits, [0.5], top_p=top_p).item() == logits.argmax()


@pytest.mark.parametrize("top_k", [1, 5, 9000])
def test_equal_logits_are_all_kept(isa: str, top_k: int) -> None:
    numbers = [(i + 0.5) / 5000 for i in range(0, 5000, 50)]
    found = draw_all(torch.zeros(5000), numbers, top_k=top_k, top_p=0.3)
    assert found.tolist() == [int(5000 * number) for number in numbers]


def test_slices_and_strides_are_read_where_they_stand(isa: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    args = [1.0] * 6, [0] * 6, [1.0] * 6, [0.0] * 6, [3] * 6, list(range(6))
    wide = torch.cat((torch.full((6, 7), 99.0), logits, torch.full((6, 9), 99.0)), dim=1)
    expected = sample_rows(logits, *args)
    assert sample_rows(wide[:, 7:307], *args) == expected
    assert sample_rows(logits.T.contiguous().T, *args) == expected


@pytest.mark.parametrize("logits", [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 3)])
def test_what_the_kernel_would_misread_is_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="sampling takes"):
        draw_rows(logits, [1.0] * 2, [0] * 2, [1.0] * 2, [0.0] * 2, [0.5] * 2)
    with pytest.raises(ValueError, match="one parameter of each per row"):
        draw_rows(torch.zeros(2, 3), [1.0], [0] * 2, [1.0] * 2, [0.0] * 2, [0.5] * 2)
