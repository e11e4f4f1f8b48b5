"""What users may import: every name of each ``__all__``, and the public names by decision."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import pytest

import flexinfer

# Names that users of the package rely on. Adding one is a decision, removing one breaks somebody.
PUBLIC = {
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Conversation",
    "DriverError",
    "EngineArgs",
    "EngineDeadError",
    "EngineError",
    "IntegrityError",
    "KVSpec",
    "LLM",
    "LLMEngine",
    "Logprob",
    "MappingLimitError",
    "OutOfMemoryError",
    "RankError",
    "ReleasedError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "LoRARequest",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedModelError",
    "VTensor",
    "VTensorError",
    "VTensorManager",
    "__version__",
}
# A module that needs an optional extra is skipped where the extra is not installed.
OPTIONAL = {"fastapi", "uvicorn", "prometheus_client", "flash_attn", "matplotlib", "psutil", "ray"}

MODULE_NAMES = sorted(
    info.name
    for info in pkgutil.walk_packages(flexinfer.__path__, "flexinfer.")
    if info.name.split(".")[-1] != "__main__"
)


@pytest.mark.parametrize("name", MODULE_NAMES)
def test_every_name_in_all_can_be_imported(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in OPTIONAL:
            pytest.skip(f"{name} needs {error.name}")
        raise
    exported = getattr(module, "__all__", [])
    missing = [attribute for attribute in exported if not hasattr(module, attribute)]
    assert not missing
    assert len(set(exported)) == len(exported)


def test_the_package_exports_exactly_the_public_names() -> None:
    assert set(flexinfer.__all__) == PUBLIC
    assert all(hasattr(flexinfer, name) for name in PUBLIC)


def test_the_version_is_the_installed_one() -> None:
    assert flexinfer.__version__ == version("flexinfer")


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, flexinfer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_of_sampling_are_where_vllm_has_them() -> None:
    """A program moves over by changing an import; structured outputs had no such place."""
    from flexinfer import sampling_params

    names = {"BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"}
    assert set(sampling_params.__all__) == names
