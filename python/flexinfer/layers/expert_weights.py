"""ExpertWeights: one product of each expert of a layer, laid out for the kernel one by one."""

from __future__ import annotations

import torch

from flexinfer import _kernels
from flexinfer.layers.host_linear import in_panels
from flexinfer.layers.quantised import QuantisedWeight, TensorKind
from flexinfer.layers.quantised_panels import QuantisedPanels, kernel_weight
from flexinfer.runtime.torch_settings import HUGE_PAGE_BYTES, back_by_huge_pages

Weight = QuantisedWeight | torch.Tensor
NUMBERS = {"scales", "minimums"}
"""Tables of one format, or both of float32."""


class ExpertWeights:
    """Weights [columns, depth] of one shape and kind. What they have of a kind (panels; or words,
    scales, ...) is one table: huge pages can back it, and it leaves no holes between what is only
    needed to make it."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.columns = self.depth = 0
        self._num_added = 0
        self._kind: TensorKind | None = None
        """None: weights are not quantised."""
        self._tables: dict[str, torch.Tensor] = {}
        """[experts, ...]"""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights with their scales."""
        return sum(table.nbytes for table in self._tables.values())

    def add(self, weight: Weight, bias: torch.Tensor | None = None) -> None:
        """The next expert's: copied. bias: [columns], of the dtype of inputs and outputs; all have
        one or none. Raises ValueError for one that is not as those before."""
        kind = (
            weight.kind._replace(has_minimums=False)
            if isinstance(weight, QuantisedWeight)
            else None
        )
        shape = tuple(weight.shape)
        if self._num_added and (*shape, kind) != (self.columns, self.depth, self._kind):
            raise ValueError(
                f"experts of one layer must have weights of one shape and kind, got {list(shape)} "
                f"{kind} beside {[self.columns, self.depth]} {self._kind}"
            )
        if bias is not None and bias.shape != shape[:1]:
            raise ValueError(f"the bias of an expert with {shape[0]} outputs is {list(bias.shape)}")
        if self._num_added and (bias is None) == ("bias" in self._tables):
            raise ValueError("experts of one layer must all have biases, or none of them")
        self.columns, self.depth = shape
        self._kind = kind
        for name, part in _parts(weight).items():
            self._put(name, part)
        if bias is not None:
            self._put("bias", bias)
        self._num_added += 1

    @property
    def bias_dtype(self) -> torch.dtype | None:
        """None: they have none."""
        return self._tables["bias"].dtype if "bias" in self._tables else None

    def products(self) -> list[_kernels.Product]:
        """As the kernel takes them, when all are there, and while this lives."""
        if len({self._tables[name].dtype for name in self._tables.keys() & NUMBERS}) > 1:
            for name in NUMBERS:
                self._tables[name] = self._tables[name].float()
        return [self._product(expert) for expert in range(self.num_experts)]

    def _put(self, name: str, part: torch.Tensor) -> None:
        """Those that had none have zeros: minimums, where zero points were all in the middle. Some
        scales may want float32 where others are numbers of fewer bits."""
        table = self._tables.get(name)
        if table is None:
            table = torch.zeros(self.num_experts, *part.shape, dtype=part.dtype)
            # Some kernels make no huge page where there is no page at all yet.
            table.view(torch.uint8).view(-1)[::HUGE_PAGE_BYTES] = 0
            back_by_huge_pages(table.data_ptr(), table.nbytes)
        elif name in NUMBERS and part.dtype != table.dtype:
            table = table.float()
        table[self._num_added] = part
        self._tables[name] = table

    def _product(self, expert: int) -> _kernels.Product:
        parts = {name: table[expert] for name, table in self._tables.items()}
        kind = self._kind
        return _kernels.Product(
            panels=parts["panels"].data_ptr() if kind is None else 0,
            quantised=None if kind is None else kernel_weight(kind, parts, self.columns),
            bias=parts["bias"].data_ptr() if "bias" in parts else 0,
            depth=self.depth,
            columns=self.columns,
        )


def _parts(weight: Weight) -> dict[str, torch.Tensor]:
    if isinstance(weight, QuantisedWeight):
        return QuantisedPanels(weight).parts
    return {"panels": in_panels(weight)}
