"""Each folder includes or imports only what the tables here allow, and no cycle exists.

C++ is read by its ``#include`` lines, Python by ``ast``; imports that only type checkers see count
too. A new folder, or a new file at a root, must be given a row here, or the test fails and says so.
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

ROOT = Path(__file__).resolve().parents[3]
CPP = ROOT / "cpp"
PYTHON = ROOT / "python" / "flexinfer"

# Folder below cpp/ -> the folders that its files may include, besides their own.
CPP_ALLOWED = {
    "common": "",
    "vtensor/util": "",
    "vtensor/driver": "vtensor/util",
    "vtensor/driver/host": "vtensor/util vtensor/driver",
    "vtensor/driver/cuda": "vtensor/util vtensor/driver",
    "vtensor/driver/sim": "vtensor/util vtensor/driver",
    "vtensor/driver/wrappers": "vtensor/util vtensor/driver",
    "vtensor/pool": "vtensor/util vtensor/driver",
    "vtensor/ops": "common vtensor/util vtensor/driver vtensor/pool",
    "vtensor/store": "vtensor/util vtensor/driver vtensor/pool",
    "vtensor/core": "vtensor/util vtensor/driver vtensor/driver/wrappers vtensor/pool vtensor/ops "
    "vtensor/store",
    "vtensor": "vtensor/util vtensor/driver vtensor/driver/wrappers vtensor/pool vtensor/ops "
    "vtensor/store vtensor/core",
    "kernels": "",
    "kernels/calls": "kernels",
    "kernels/simd": "kernels kernels/calls",
    "kernels/isa": "kernels kernels/calls kernels/simd",
    "kernels/attention": "common kernels kernels/calls kernels/isa",
    "kernels/linear": "kernels kernels/calls kernels/isa",
    "kernels/rows": "kernels kernels/calls kernels/isa",
    "kernels/layer": "kernels kernels/calls kernels/isa kernels/attention kernels/linear "
    "kernels/rows",
    "kernels/sampling": "kernels kernels/calls kernels/isa",
    "bindings": "vtensor vtensor/util vtensor/driver vtensor/driver/host vtensor/driver/cuda "
    "vtensor/driver/sim vtensor/driver/wrappers vtensor/pool vtensor/ops vtensor/core kernels "
    "kernels/attention kernels/layer kernels/linear kernels/rows kernels/sampling",
}

# Folder below flexinfer/, or file directly in it -> what it may import, besides its own folder.
# Lowest first.
PYTHON_ALLOWED = {
    "types": "",
    "errors": "_vtensor",
    "outputs": "types",
    "events": "runtime vtensor",
    "scheduler_config": "runtime",
    "speculative_config": "runtime",
    "config": "events handover runtime sampling scheduler_config speculative_config",
    "engine_args": "config runtime",
    "runtime": "_kernels",
    "vtensor": "_vtensor errors runtime",
    "vattention": "vtensor",
    "attention": "_kernels errors runtime",
    "layers": "_kernels attention runtime",
    "checkpoints": "errors layers runtime",
    "models": "attention checkpoints config errors layers runtime scheduler_config vtensor",
    "sampling": "_kernels errors runtime",
    "sampling_params": "sampling",
    "metrics": "outputs vtensor",
    "scheduler": "errors metrics outputs sampling scheduler_config types vtensor",
    "speculation": "config metrics scheduler vtensor",
    "memory": "config errors models runtime scheduler scheduler_config vtensor",
    "lora": "checkpoints errors layers models runtime",
    "runner": "attention layers models runtime sampling vtensor",
    "distributed": "config errors layers memory models runner runtime sampling vtensor",
    "replay": "errors vtensor",
    "handover": "errors vtensor",
    "engine": "attention checkpoints config distributed errors events handover lora memory metrics "
    "models outputs runner runtime sampling scheduler speculation types vtensor",
    "conversation": "engine errors lora outputs sampling types",
    "llm": "conversation engine engine_args errors lora metrics outputs runtime sampling types",
    "async_llm": "config engine engine_args errors lora outputs runtime sampling types",
    "loadgen": "",
    "routing": "",
    "simulation": "loadgen outputs routing runtime sampling scheduler scheduler_config vtensor",
    "server": "async_llm engine errors handover lora memory metrics outputs runtime sampling "
    "scheduler types vtensor",
    "ray": "async_llm config routing server vtensor",
    "cli": "async_llm attention config conversation engine errors llm loadgen memory models "
    "outputs ray replay routing runtime sampling scheduler scheduler_config server simulation "
    "types vtensor",
}
# The same inside server/ and cli/: folder, or file directly in it -> what else there it may import.
INNER_ALLOWED = {
    "server": {
        "protocol": "",
        "handover": "",
        "observability": "handover",
        "http": "observability",
        "parsing": "",
        "lora_module_path": "",
        "settings": "handover http lora_module_path observability parsing",
        "harmony_messages": "",
        "chat_renderer": "harmony_messages http protocol",
        "token_bytes": "",
        "stores": "http lora_module_path observability protocol settings",
        "state": "chat_renderer handover http observability parsing settings stores token_bytes",
        "api": "chat_renderer http observability parsing protocol state stores token_bytes",
        "app": "api http observability protocol settings state",
        "run": "handover http settings state",
    },
    "cli": {
        "standard_output": "",
        "errors": "standard_output",
        "result_file": "errors",
        "help": "",
        "options": "",
        "option_model": "",
        "plot": "errors",
        "terminal_text": "",
        "fitting_table": "",
        "settings": "errors option_model options",
        "endpoint": "",
        "memory_map": "terminal_text",
        "inspect": "endpoint errors fitting_table memory_map options plot result_file "
        "terminal_text",
        "top": "endpoint errors fitting_table options terminal_text",
        "doctor": "terminal_text",
        "replay": "errors fitting_table terminal_text",
        "chat": "demo endpoint errors inspect memory_map option_model options settings "
        "terminal_text",
        "demo": "errors memory_map option_model plot result_file settings terminal_text",
        "bench": "endpoint errors fitting_table help option_model options plot result_file "
        "settings",
        "serve": "errors help option_model options settings",
        "simulate": "errors fitting_table option_model result_file settings terminal_text",
        "app": "bench chat demo doctor errors help inspect option_model options replay "
        "serve settings simulate standard_output top",
        "__main__": "app",
    },
}
# The package's own __init__ re-exports lazily from every folder; nothing inside may import it.
PYTHON_UNLAYERED = {"__init__"}

# Who may open the extensions, and what must not need torch.
MAY_IMPORT_MANAGER = {"errors", "vtensor"}
MAY_IMPORT_KERNELS = {
    "flexinfer.attention.host",
    "flexinfer.layers.decoder_kernel",
    "flexinfer.layers.expert_weights",
    "flexinfer.layers.experts",
    "flexinfer.layers.host_linear",
    "flexinfer.layers.quantised_linear",
    "flexinfer.layers.quantised_panels",
    "flexinfer.layers.rows",
    "flexinfer.runtime.kernels",
    "flexinfer.runtime.rotation",
    "flexinfer.sampling.host_sampler",
}
TORCH_FREE = {
    "config",
    "errors",
    "loadgen",
    "metrics.requests",
    "metrics.steps",
    "outputs",
    "replay.replay",
    "runtime.openmp",
    "runtime.threads",
    "sampling.grammars",
    "runner.executor",
    "runner.plan",
    "sampling.params",
    "sampling.random",
    "sampling.sequences",
    "scheduler.scheduler",
    "engine.history",
    "engine.inputs",
    "engine.plan_builder",
    "engine.stream_pace",
    "types",
    "vattention",
    "vtensor",
}


def allowed(unit: str, table: dict[str, str]) -> set[str]:
    if unit not in table:
        pytest.fail(f"{unit!r} has no row: add it to the table in {Path(__file__).name}")
    return {unit, *table[unit].split()}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """One cycle as a list of files, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


# ------------------------------------------------------------------------------------------ C++


def cpp_graph() -> dict[str, set[str]]:
    """Each C++ file, relative to cpp, with the project's headers that it includes."""
    include = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
    files = [path for suffix in ("*.h", "*.cpp") for path in CPP.rglob(suffix)]
    return {
        path.relative_to(CPP).as_posix(): set(include.findall(path.read_text())) for path in files
    }


def cpp_folder(file: str) -> str:
    return Path(file).parent.as_posix()


def test_cpp_folders_include_only_what_they_may() -> None:
    forbidden = [
        f"{file} includes {header}"
        for file, headers in cpp_graph().items()
        for header in headers
        if cpp_folder(header) not in allowed(cpp_folder(file), CPP_ALLOWED)
    ]
    assert not forbidden, "\n".join(forbidden)


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
        if path.parent.name != "bindings" and python.search(path.read_text())
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
    skipped = type_checking_blocks(tree) | inside_functions(tree) if at_load_only else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_graph(*, at_load_only: bool = False) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        targets = {resolve(name) for name in imports(module, at_load_only=at_load_only)}
        graph[module] = {target for target in targets if target and target != module}
    return graph


def python_unit(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_python_folders_import_only_what_they_may() -> None:
    forbidden = [
        f"{module} imports {target}"
        for module, targets in python_graph().items()
        if python_unit(module) not in PYTHON_UNLAYERED
        for target in targets
        if python_unit(target) not in allowed(python_unit(module), PYTHON_ALLOWED)
    ]
    assert not forbidden, "\n".join(forbidden)


def test_the_tables_allow_no_cycle() -> None:
    for table in (CPP_ALLOWED, PYTHON_ALLOWED):
        assert not cycle_in({unit: set(row.split()) for unit, row in table.items()})


@pytest.mark.parametrize("package", sorted(INNER_ALLOWED))
def test_the_folders_of_a_package_import_only_what_they_may(package: str) -> None:
    table, root = INNER_ALLOWED[package], f"flexinfer.{package}"
    units = {
        module: {t for t in targets if t.startswith(f"{root}.")}
        for module, targets in python_graph().items()
        if module.startswith(f"{root}.")
    }
    forbidden = [
        f"{module} imports {target}"
        for module, targets in units.items()
        for target in targets
        if inner_unit(target) not in allowed(inner_unit(module), table)
    ]
    assert not forbidden, "\n".join(forbidden)
    assert not cycle_in({unit: set(row.split()) for unit, row in table.items()})
    assert not cycle_in(units)


def inner_unit(module: str) -> str:
    return module.split(".")[2]


def test_python_modules_form_no_cycle() -> None:
    """Neither by imports that only type checkers or functions see."""
    # A package and its own modules count as one: __init__ may gather what its files define.
    graph = {
        module: {t for t in targets if not t.startswith(module + ".")} - {"flexinfer"}
        for module, targets in python_graph().items()
        if python_unit(module) not in PYTHON_UNLAYERED
    }
    assert not cycle_in(graph)


def test_only_some_modules_open_the_kernels() -> None:
    openers = {
        module for module, targets in python_graph().items() if "flexinfer._kernels" in targets
    }
    assert openers == MAY_IMPORT_KERNELS


def test_only_the_manager_and_errors_open_the_extension() -> None:
    openers = {
        python_unit(module)
        for module, targets in python_graph().items()
        if "flexinfer._vtensor" in targets
    }
    assert openers <= MAY_IMPORT_MANAGER


@pytest.mark.parametrize("unit", sorted(TORCH_FREE))
def test_loading_a_torch_free_module_loads_no_torch(unit: str) -> None:
    code = (
        f"import sys, flexinfer.{unit}\n"
        "heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_scheduler_never_imports_torch() -> None:
    of_scheduler = [module for module in MODULES if python_unit(module) == "scheduler"]
    imported = {name.split(".")[0] for module in of_scheduler for name in imports(module)}
    assert of_scheduler
    assert not imported & {"torch", "transformers"}
