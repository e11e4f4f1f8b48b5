"""Fixtures and rules that all Python tests share.

Markers choose tests by what the machine can do: ``gpu`` needs a CUDA device, ``browser`` a browser,
``slow`` only time. This file imports neither torch nor flexinfer, so that a test may check what an
import pulls in.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from helpers.cuda_devices import hides_gpus, num_cuda_devices

if TYPE_CHECKING:
    from flexinfer import LLM
    from helpers.standin_cuda import StandinCuda

# Before anything imports torch or transformers. PASSIVE: OpenMP threads that spin while another
# process wants the core slow everything down (measured on 2 cores: a 2.3 ms matmul took 16 ms).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Beside other test processes (pytest -n), servers and benchmarks must bind no threads to cores:
# all would bind theirs to the same ones. A single thread is not bound.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# "default" explores anew in each run, "ci" repeats one exploration, "long" is for a night.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile(
    "long", parent=settings.get_profile("default"), max_examples=5000, stateful_step_count=200
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    if hides_gpus(config.getoption("markexpr")):  # before anything imports torch
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def has_browser() -> bool:
    return any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, with the reason."""
    missing: dict[str, str] = {}
    if any(item.get_closest_marker("gpu") for item in items) and num_cuda_devices() == 0:
        missing["gpu"] = "no CUDA device; where there is one, it is seen with -m gpu"
    if not has_browser():
        missing["browser"] = "no Chromium or Chrome on PATH"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What the imports have made lives to the end: millions of objects that each full garbage
    collection would look at again (0.4 s, in tests that call it and at random in others)."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind reports what is left at the end


@pytest.fixture(autouse=True)
def _loggers_are_left_as_they_were() -> Iterator[None]:
    """A command that sets up logging writes to the stderr of its test, which is closed later."""
    loggers = [logging.getLogger(), logging.getLogger("flexinfer")]
    before = [list(logger.handlers) for logger in loggers]
    yield
    for logger, handlers in zip(loggers, before, strict=True):
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler and handler not in handlers:
                logger.removeHandler(handler)


@pytest.fixture(scope="session")
def standin_library() -> StandinCuda:
    """The stand-in CUDA driver, built when it is first needed."""
    from helpers.standin_cuda import StandinCuda

    return StandinCuda()


@pytest.fixture
def standin(standin_library: StandinCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandinCuda]:
    """``device="cuda"`` is the stand-in, with its 2 MiB granularity. The test must leave no
    memory in it and break no rule of CUDA's."""
    monkeypatch.setenv("FLEXINFER_LIBCUDA", standin_library.path)
    standin_library.reset()
    yield standin_library
    standin_library.check()
    standin_library.reset()


@pytest.fixture(params=["cpu", "cuda"])
def kv_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs a test of the manager on each device; see kv_device.py."""
    from helpers import device_param as devices

    needs_standin = request.param == "cuda"
    standin = request.getfixturevalue("standin_library") if needs_standin else None
    with devices.use(request.param, standin, monkeypatch):
        yield request.param


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model, its tokenizer and a chat template."""
    from helpers.tiny_models import save_chat_model

    return save_chat_model(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture(scope="module")
def llm(model_path: str) -> Iterator[LLM]:
    """An engine over that model; the tests must leave its memory sound."""
    from flexinfer import LLM

    with LLM(model_path, max_num_seqs=8, kv_cache_memory_bytes=64 << 20) as llm:
        yield llm
        llm.llm_engine.manager.check_integrity()
