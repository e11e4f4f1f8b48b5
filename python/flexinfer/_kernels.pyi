"""
Attention and row operations on the CPU. Internal; see runtime.kernels.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def available_isas() -> list[str]:
    """Instruction sets that this build and this CPU both have."""

DTYPES: dict = {'float32' : 0, 'bfloat16' : 1, 'float16' : 2}

KV_FORMATS: dict = {'auto' : 0, 'int8' : 1, 'fp8_e4m3' : 2}

SCALE_FORMATS: dict = ...

SCALE_BLOCK: int = 256

SCALE_BYTES: int = 4

class Plan:
    """What one step's attention consists of, the same for all layers."""

    def __init__(self, segments: Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], shared: Sequence[tuple[int, int, int, Sequence[int]]], num_kv_heads: int, group: int, window: int = 9223372036854775807, num_threads: int = 1, chunk: int = 9223372036854775807, rows: Sequence[int] | None = None) -> None:
        """
        segments: int64 [n, 4] of slot, row, start, end. shared: (slot, start, end, members) of each shared range. rows: whose outputs are wanted; None: all. Raises ValueError where they contradict each other.
        """

    @property
    def num_tokens(self) -> int: ...

class ArenaShape:
    """Shape and strides, in elements, of each layer's K and V."""

    def __init__(self, dtype: int, num_slots: int, max_seq_len: int, num_kv_heads: int, key_dim: int, value_dim: int, k_strides: tuple[int, int, int], v_strides: tuple[int, int, int], format: int = 0) -> None:
        """
        Strides: between slots, tokens and heads. format: one of KV_FORMATS; dtype: what comes.
        """

class HostAttention:
    """A step's attention over the KV arena, one call per layer."""

    def __init__(self, shape: ArenaShape, layers: Sequence[tuple[int, int]], start_threads: int = 0, isa: str = '') -> None:
        """
        layers: addresses of K and V. start_threads: address of GOMP_parallel, 0 for one thread. isa: one of available_isas(), or the best. Raises ValueError for an unsupported head size.
        """

    @property
    def isa(self) -> str: ...

    def forward(self, plan: Plan, layer: int, query: int, query_head_stride: int, query_token_stride: int, key: int, key_head_stride: int, key_token_stride: int, value: int, value_head_stride: int, value_token_stride: int, output: int, scaling: float, softcap: float, sinks: int) -> None:
        """
        Store key and value, write the output. Addresses, and strides in elements; key or value 0: what it would store is there.
        """

class RowOps:
    """Operations on the rows of a batch; addresses as integers."""

    def __init__(self, start_threads: int = 0, isa: str = '') -> None: ...

    def rms_norm(self, dtype: int, x: int, x_stride: int, weight: int, has_wide_weight: bool, output: int, num_rows: int, width: int, eps: float, num_threads: int) -> None:
        """has_wide_weight: it is float32, whatever the rows are."""

    def silu_mul(self, dtype: int, x: int, x_stride: int, factor: int, factor_stride: int, output: int, num_rows: int, width: int, num_threads: int) -> None: ...

    def gelu_tanh_mul(self, dtype: int, x: int, x_stride: int, factor: int, factor_stride: int, output: int, num_rows: int, width: int, num_threads: int) -> None: ...

    def relu2(self, dtype: int, x: int, x_stride: int, output: int, num_rows: int, width: int, num_threads: int) -> None: ...

    def rotate(self, dtype: int, x: int, head_stride: int, token_stride: int, cos: int, sin: int, output: int, output_head_stride: int, output_token_stride: int, num_heads: int, num_tokens: int, width: int, num_threads: int) -> None: ...

class Linear:
    """Linear layers with packed weights; addresses as integers."""

    def __init__(self, start_threads: int = 0, isa: str = '') -> None: ...

    @property
    def isa(self) -> str: ...

    def panel_columns(self, dtype: int) -> int:
        """Outputs that stand side by side in a packed weight."""

    def has_gates(self, dtype: int, depth: int) -> bool:
        """Whether gates of many rows are computed with their product."""

    def forward(self, dtype: int, x: int, x_stride: int, panels: int, bias: int, residual: int, residual_stride: int, output: int, num_rows: int, depth: int, columns: int, gates: bool, num_threads: int) -> None:
        """
        output [num_rows, columns] = x weight^T + bias + residual; bias, residual: 0 for none. gates: output [num_rows, columns / 2] = silu(first half) * second half, no residual.
        """

class QuantisedWeight:
    """A quantised weight at addresses: no copy."""

    def __init__(self, *, words: int, scales: int, minimums: int, sums: int, scale_format: int, byte_inputs: bool, bits: int, group: int, depth: int, columns: int, codebook: Sequence[int] | None, factor_unit: float, rotates_inputs: bool = False) -> None:
        """
        scale_format: one of SCALE_FORMATS; codebook: the 16 numbers that 4 bits stand for, or None. Raises ValueError where they do not go with the sizes.
        """

class QuantisedLinear:
    """Linear layers with quantised weights; addresses as integers."""

    def __init__(self, start_threads: int = 0, isa: str = '') -> None: ...

    @property
    def isa(self) -> str: ...

    @property
    def block_rows(self) -> int: ...

    @staticmethod
    def has_gates(columns: int) -> bool:
        """Whether `forward` can take so many columns for gates and factors."""

    def forward(self, dtype: int, weight: QuantisedWeight, x: int, x_stride: int, bias: int, residual: int, residual_stride: int, output: int, num_rows: int, gates: bool, num_threads: int) -> None:
        """
        output [num_rows, columns] = x weight^T + bias + residual; bias, residual: 0 for none. gates: of columns that has_gates accepts, and without a residual, output [num_rows, columns / 2] = silu(first half) * second half.
        """

def rotate(x: int, rows: int, depth: int) -> None:
    """
    x float32 [rows, depth], dense: each row times a Hadamard matrix, as runtime/rotation.py says.
    """

def write_words(integers: int, columns: int, depth: int, bits: int, from_zero: bool, words: int) -> bool:
    """
    words [panels, steps, words of a step, 64] of integers [columns, depth], from_zero: each plus 2^(bits - 1). Returns whether all have so many bits.
    """

def available_quantised_isas() -> list[str]:
    """Levels of the kernels for quantised weights that are here, best last."""

class Product:
    """A linear layer's weight at addresses: no copy."""

    def __init__(self, *, panels: int, quantised: QuantisedWeight | None, bias: int, depth: int, columns: int) -> None: ...

class DecoderLayer:
    """A decoder layer's weights; addresses as integers."""

    def __init__(self, *, dtype: int, row_ops: RowOps, linear: Linear, quantised: QuantisedLinear, input_norm: tuple[int, float, bool], output_norm: tuple[int, float, bool], query_norm: tuple[int, float, bool], key_norm: tuple[int, float, bool], attention_norm: tuple[int, float, bool], mlp_norm: tuple[int, float, bool], qkv: Sequence[Product], o: Product, gate_up: Sequence[Product], down: Product | None, num_heads: int, num_kv_heads: int, head_dim: int, activation: str) -> None:
        """
        Norms: address of the weight, 0 for none, eps, and whether the weight is float32 whatever the rows are. Products of a list are as one, their outputs one after the other. gate_up [] and down None: the layer up to its MLP.
        """

def forward_decoder_layers(layers: Sequence[DecoderLayer], attention: Sequence[tuple[HostAttention, Plan, int, bool, float, float, int]], x: int, cos: int, sin: int, output: int, normed: int, num_rows: int, num_threads: int) -> None:
    """
    Layers one after the other; attention: kernel, plan, layer, stores, scaling, softcap and sinks (float32 [num_heads], 0 for none) of each. x [rows, width] -> output [rows, width]; cos, sin [rows, head_dim]; all dense. Of a layer up to its MLP output is what the MLP's is added to, normed [rows, width] its input.
    """

class Experts:
    """A mixture of experts in one call; addresses as integers."""

    def __init__(self, *, dtype: int, row_ops: RowOps, linear: Linear, quantised: QuantisedLinear, gate_up: Sequence[Sequence[Product]], down: Sequence[Product], activation: str = 'silu', alpha: float = 1.0, limit: float = 0.0) -> None:
        """
        gate_up: of each expert gates and factors together, or all gates, then all factors; factors alone for relu2. activation: silu, gelu_tanh or clamped_swiglu of gates, times factors; or relu2. alpha, limit: of clamped_swiglu. Raises ValueError where they do not go together.
        """

    def forward(self, x: int, experts: int, weights: int, output: int, num_tokens: int, top_k: int, num_threads: int) -> None:
        """
        output [tokens, width] of x [tokens, width], experts int64 and weights float32 [tokens, top_k]; all dense. Raises ValueError for an expert that there is not.
        """

class RowSampler:
    """One random token per row of logits."""

    def __init__(self, start_threads: int = 0, isa: str = '') -> None: ...

    def sample(self, dtype: int, logits: int, row_stride: int, vocab_size: int, temperature: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float], uniform: Sequence[float], num_threads: int) -> list[int]:
        """Token ids; -1 for a row with a NaN, or without a largest finite logit."""
