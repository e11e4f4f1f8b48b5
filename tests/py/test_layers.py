"""A file includes or imports only its own layer or lower ones, and no cycle exists.

C++ is read by its ``#include "vtensor/..."`` lines, Python by ``ast``. A new top-level file or
folder must be given a layer here, or the test fails and says so.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "cpp" / "vtensor"
PYTHON = ROOT / "python" / "flexinfer"

# Lowest first. A name is a file's stem or a folder directly under cpp/vtensor.
CPP_LAYERS = [
    {"error", "units"},
    {"vmm", "kernels"},
    {"pool"},
    {"ops"},
    {"sched"},
    {"manager", "manager_swap", "manager_trace", "manager_view", "manager_worker", "snapshot"},
    {"bindings"},
]
# Kernels compute on plain pointers: they know nothing of drivers, though these are not above them.
CPP_FORBIDDEN = {("kernels", "vmm")}

# Lowest first. A name is a module or a package directly under flexinfer.
PYTHON_LAYERS = [
    {"errors", "_vtensor", "_kernels"},
    {
        "units",
        "stats",
        "kv_spec",
        "device",
        "openmp",
        "threads",
        "torch_runtime",
        "transfer",
        "weight_files",
    },
    {
        "types",
        "config",
        "structured",
        "sampling_params",
        "outputs",
        "inputs",
        "request",
        "history",
    },
    {"core_arguments", "manager_settings", "vtensor_handle", "vtensor"},
    {"trace_reader", "replay_report", "replay_meter", "replay", "vattention"},
    {"attention"},
    {
        "packed_linear",
        "panel_linear",
        "lean_linear",
        "lean_operators",
        "row_ops",
        "lean_rotary",
        "lean_attention",
        "lean_mlp",
        "lean_decoder",
        "lean_layers",
    },
    {"models"},
    {"admission", "batch", "memory", "pins", "policies", "preemption", "prefetch"},
    {"request_stats", "step_stats", "stream_pace"},
    {"scheduler"},
    {"elastic", "kernel_epoch", "kv_setup", "torch_memory"},
    {"detokenizer", "output_builder", "sampler", "step_inputs", "cuda_graphs", "runner"},
    {"request_group", "parallel_sampling", "beam_search"},
    {"engine"},
    {"step_profile"},
    {"llm", "conversation", "engine_thread", "async_llm"},
    {"server", "loadgen"},
    {"cli", "__main__"},
]
# The package's own __init__ re-exports lazily from every layer; nothing inside may import it.
PYTHON_UNLAYERED = {"__init__"}

# Who may open the extension, and who must not need torch.
MAY_IMPORT_EXTENSION = {"errors", "manager_settings", "vtensor", "vtensor_handle"}
TORCH_FREE = {
    "admission",
    "batch",
    "config",
    "core_arguments",
    "errors",
    "history",
    "inputs",
    "kv_spec",
    "loadgen",
    "manager_settings",
    "openmp",
    "outputs",
    "pins",
    "policies",
    "preemption",
    "prefetch",
    "replay",
    "request",
    "request_stats",
    "sampling_params",
    "scheduler",
    "stats",
    "step_stats",
    "stream_pace",
    "threads",
    "structured",
    "trace_reader",
    "types",
    "vattention",
    "vtensor",
    "vtensor_handle",
}


def layer_of(unit: str, layers: list[set[str]]) -> int:
    for level, names in enumerate(layers):
        if unit in names:
            return level
    pytest.fail(f"{unit!r} has no layer: add it to the table in {Path(__file__).name}")


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a list of files, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


# ------------------------------------------------------------------------------------------ C++


def cpp_graph() -> dict[str, set[str]]:
    """Each C++ file, relative to cpp/vtensor, with the project's headers that it includes."""
    include = re.compile(r'^\s*#\s*include\s*"vtensor/([^"]+)"', re.MULTILINE)
    files = [path for suffix in ("*.h", "*.cpp") for path in CPP.rglob(suffix)]
    return {
        path.relative_to(CPP).as_posix(): set(include.findall(path.read_text())) for path in files
    }


def cpp_unit(file: str) -> str:
    return file.split("/")[0] if "/" in file else Path(file).stem


def test_no_cpp_file_includes_a_higher_layer() -> None:
    upward = [
        f"{file} includes {header}"
        for file, headers in cpp_graph().items()
        for header in headers
        if layer_of(cpp_unit(header), CPP_LAYERS) > layer_of(cpp_unit(file), CPP_LAYERS)
        or (cpp_unit(file), cpp_unit(header)) in CPP_FORBIDDEN
    ]
    assert not upward, "\n".join(upward)


def test_cpp_headers_form_no_cycle() -> None:
    assert not cycle_in(cpp_graph())


def test_every_include_of_the_project_names_an_existing_header() -> None:
    missing = {h for headers in cpp_graph().values() for h in headers if not (CPP / h).is_file()}
    assert not missing


def test_only_the_bindings_know_python() -> None:
    python = re.compile(r'#\s*include\s*[<"](Python\.h|nanobind/|pybind11/|torch/|ATen/)')
    offenders = [
        path.relative_to(CPP).as_posix()
        for path in CPP.rglob("*.[hc]*")
        if path.parent != CPP / "bindings" and python.search(path.read_text())
    ]
    assert not offenders


# ------------------------------------------------------------------------------------------ Python


def module_name(path: Path) -> str:
    parts = path.relative_to(PYTHON.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PYTHON.rglob("*.py")}


EXTENSIONS = {"flexinfer._vtensor", "flexinfer._kernels"}


def resolve(name: str) -> str | None:
    """The module of ours that the dotted ``name`` lies in, or None."""
    while name.startswith("flexinfer"):
        if name in MODULES or name in EXTENSIONS:
            return name
        name = name.rpartition(".")[0]
    return None


def type_checking_blocks(tree: ast.AST) -> set[ast.AST]:
    """Everything under ``if TYPE_CHECKING:``, which never runs."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {inner for block in blocks for stmt in block.body for inner in ast.walk(stmt)}


def inside_functions(tree: ast.AST) -> set[ast.AST]:
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return {inner for function in functions for inner in ast.walk(function)}


def imports(module: str, *, at_load_only: bool = False) -> Iterator[str]:
    """Dotted names that ``module`` imports; ``at_load_only``: only those that loading it runs."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(), str(path))
    skipped = type_checking_blocks(tree)
    if at_load_only:
        skipped |= inside_functions(tree)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base]) if base else ".".join(anchor)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def python_graph(*, at_load_only: bool = False) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        targets = {resolve(name) for name in imports(module, at_load_only=at_load_only)}
        graph[module] = {target for target in targets if target and target != module}
    return graph


def python_unit(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_no_python_module_imports_a_higher_layer() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in python_graph().items()
        if python_unit(module) not in PYTHON_UNLAYERED
        for target in targets
        if python_unit(target) in PYTHON_UNLAYERED
        or layer_of(python_unit(target), PYTHON_LAYERS)
        > layer_of(python_unit(module), PYTHON_LAYERS)
    ]
    assert not upward, "\n".join(upward)


def test_python_modules_form_no_cycle() -> None:
    # A package and its own modules count as one: __init__ may gather what its files define.
    graph = {
        module: {t for t in targets if not t.startswith(module + ".")}
        for module, targets in python_graph(at_load_only=True).items()
    }
    assert not cycle_in(graph)


def test_only_attention_row_operations_and_panels_open_the_kernels() -> None:
    openers = {
        module for module, targets in python_graph().items() if "flexinfer._kernels" in targets
    }
    assert openers == {
        "flexinfer.attention.host",
        "flexinfer.panel_linear",
        "flexinfer.row_ops",
    }


def test_only_the_manager_and_errors_open_the_extension() -> None:
    openers = {
        python_unit(module)
        for module, targets in python_graph().items()
        if "flexinfer._vtensor" in targets
    }
    assert openers <= MAY_IMPORT_EXTENSION


@pytest.mark.parametrize("unit", sorted(TORCH_FREE))
def test_loading_a_torch_free_module_loads_no_torch(unit: str) -> None:
    if not any(python_unit(module) == unit for module in MODULES):
        pytest.skip(f"flexinfer.{unit} does not exist")
    code = (
        f"import sys, flexinfer.{unit}\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_scheduler_never_imports_torch() -> None:
    guilty = [
        f"{module} imports {name}"
        for module in MODULES
        if python_unit(module) == "scheduler"
        for name in imports(module)
        if name.split(".")[0] in {"torch", "transformers"}
    ]
    assert not guilty
