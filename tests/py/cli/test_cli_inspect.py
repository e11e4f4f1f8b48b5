"""`flexinfer inspect`: who shares a chunk, and why a prefix stays, of a map by a real manager."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.inspect.report import MemoryReport, PrefixUse
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers.stub_http_server import Reply, loopback

TOKENS_PER_CHUNK = 8
SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=32, max_seq_len=256)


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    chunk_bytes = SPEC.bytes_per_token * TOKENS_PER_CHUNK
    with VTensorManager(
        SPEC, max_requests=4, memory_budget="1MiB", chunk_bytes=chunk_bytes, park=False
    ) as manager:
        yield manager


def memory_map(manager: VTensorManager, requests: dict[int, str] | None = None) -> dict[str, Any]:
    """As docs/server.md describes the answer of /admin/memory."""
    snapshot = manager.snapshot()
    planes = slice(None, None, snapshot.num_planes)
    return {
        "model": "tiny",
        "chunk_bytes": snapshot.chunk_bytes,
        "num_planes": snapshot.num_planes,
        "row_tokens": TOKENS_PER_CHUNK,
        "stats": manager.stats().as_dict(),
        "vtensors": [
            {
                "id": info.id,
                "slot": info.slot,
                "state": info.state,
                "request_id": (requests or {}).get(info.id),
                "num_tokens": info.num_tokens,
                "num_cached_tokens": info.num_cached_tokens,
                "chunks": info.table[planes],
            }
            for info in snapshot.vtensors
        ],
        "chunks": [
            {
                "id": info.id,
                "refs": info.refs,
                "recorded": info.recorded,
                "pinned": info.pinned,
                "appender": info.appender,
                "sharers": info.sharers,
            }
            for info in snapshot.chunks
        ],
        "prefixes": [
            {
                "start_tokens": info.start_tokens,
                "num_tokens": info.num_tokens,
                "parent": info.parent,
                "chunks": info.chunks[planes],
                "text": f" words {info.first_tokens[0]}",
                "tenant": info.cache_salt,
                "pinned_by": info.pinned_by,
            }
            for info in snapshot.prefixes
        ],
    }


def record(manager: VTensorManager, tokens: list[int]) -> Any:
    vtensor = manager.create(tokens)
    vtensor.extend(len(tokens))
    vtensor.record_prefix(tokens)
    return vtensor


def prefix_of(manager: VTensorManager, requests: dict[int, str] | None = None) -> PrefixUse:
    (prefix,) = MemoryReport.from_json(memory_map(manager, requests)).prefixes
    return prefix


def test_a_prefix_that_nobody_uses_can_go(manager: VTensorManager) -> None:
    record(manager, list(range(32))).release()
    prefix = prefix_of(manager)
    assert (prefix.kept_because, prefix.shared_by) == ((), ())
    assert prefix.num_freed_chunks == len(prefix.chunks) == 4
    manager.drain()
    before = manager.stats().free_bytes
    manager.reset_prefix_cache()
    manager.drain()
    assert manager.stats().free_bytes - before == 4 * manager.chunk_bytes


def test_a_prefix_in_use_names_its_users(manager: VTensorManager) -> None:
    tokens = list(range(32))
    first = record(manager, tokens)
    second = manager.create([*tokens[:16], 99])  # what it does not use becomes a prefix of its own
    head, rest = MemoryReport.from_json(memory_map(manager, {first.id: "one"})).prefixes
    assert head.shared_by == ("one", f"vTensor {second.id}")
    assert head.num_freed_chunks == rest.num_freed_chunks == 0
    assert f"in use by one (2), vTensor {second.id} (2)" in " ".join(head.kept_because)
    assert "in use by one (2)" in rest.kept_because[0]


def test_a_pinned_prefix_names_its_owner(manager: VTensorManager) -> None:
    tokens = list(range(32))
    record(manager, tokens).release()
    manager.pin_prefix(tokens, "conv_1")
    prefix = prefix_of(manager)
    assert prefix.kept_because == ("pinned by conv_1",)
    assert prefix.num_freed_chunks == 0


def test_a_prefix_that_others_continue_names_them(manager: VTensorManager) -> None:
    shared = list(range(16))
    for tail in (100, 200):
        record(manager, [*shared, *range(tail, tail + 16)]).release()
    report = MemoryReport.from_json(memory_map(manager))
    prefixes = report.prefixes
    assert sorted(report.first_chunks()) == [0, 2, 2]
    (root,) = [prefix for prefix in prefixes if prefix.start_tokens == 0]
    others = sorted(prefix.label for prefix in prefixes if prefix is not root)
    assert root.kept_because[0] == f"{', '.join(others)} must go first"
    assert root.num_freed_chunks == 2


def test_shared_chunks_of_a_vtensor_are_counted(manager: VTensorManager) -> None:
    tokens = list(range(32))
    record(manager, tokens)
    other = manager.create([*tokens[:16], 99])
    other.extend(40)
    uses = MemoryReport.from_json(memory_map(manager)).vtensors
    counts = {use.id: (len(use.chunks), use.num_shared_chunks) for use in uses}
    assert counts[other.id] == (5, 2)


# The command.


def saved(manager: VTensorManager, folder: Path) -> str:
    tokens = list(range(32))
    first = record(manager, tokens)
    other = manager.create([*tokens[:16], 99])
    other.extend(24)
    file = folder / "map.json"
    file.write_text(json.dumps(memory_map(manager, {first.id: "chat-[1]"})))
    return str(file)


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


def test_without_options_it_is_a_summary(manager: VTensorManager, tmp_path: Path) -> None:
    file = Path(saved(manager, tmp_path))
    body = json.loads(file.read_text())
    file.write_text(json.dumps({**body, "engine": {"num_running": 2, "num_waiting": 1}}))
    result = CliRunner().invoke(app, ["inspect", "--file", str(file)], env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert len(lines) < 12
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "2 running, 1 waiting, 0 swapped" in text
    assert "used of 1.0 MiB" in text
    assert "32 tokens  words 0 words 16" in text, "a prefix is called after its first words"
    assert "pressure  none" in text
    assert "chat-[1]" not in text


def test_prefixes_beyond_the_longest_are_counted(manager: VTensorManager, tmp_path: Path) -> None:
    for i in range(9):
        record(manager, [100 * i] * (8 + i)).release()
    file = tmp_path / "map.json"
    file.write_text(json.dumps(memory_map(manager)))
    _, out, _ = invoke("--file", str(file))
    assert [line.split()[0] for line in out.splitlines() if " tokens " in line] == [
        *("16", "15", "14", "13", "12")
    ]
    assert "4 more" in out


def test_the_tables_show_the_sharing(manager: VTensorManager, tmp_path: Path) -> None:
    code, out, _ = invoke("--file", saved(manager, tmp_path), "--map", "--tables")
    assert code == 0
    assert "chat-[1]" in out
    assert "Recorded prefixes" in out
    assert "chunks in use by chat-[1] (2)" in out
    assert "in chat-[1], vTensor" in out


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_tables_are_readable_where_they_do_not_fit(
    manager: VTensorManager, columns: str, tmp_path: Path
) -> None:
    file = saved(manager, tmp_path)
    result = CliRunner().invoke(
        app, ["inspect", "--file", file, "--tables"], env={"COLUMNS": columns}
    )
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    text = " ".join(result.stdout.split())
    assert "shared by chat-[1], vTensor" in text
    assert "cannot be freed because prefix 2 must go first; chunks in use by chat-[1] (2)" in text


def test_the_json_has_every_number(manager: VTensorManager, tmp_path: Path) -> None:
    code, out, _ = invoke("--file", saved(manager, tmp_path), "--json")
    assert code == 0
    found = json.loads(out)
    assert found["stats"]["shared_bytes"] == 2 * manager.chunk_bytes
    assert found["vtensors"][0]["label"] == "chat-[1]"
    assert found["prefixes"][0]["shared_by"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_is_drawn(manager: VTensorManager, suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"map.{suffix}"
    code, out, _ = invoke("--file", saved(manager, tmp_path), "--picture", str(picture))
    assert code == 0
    assert "picture" in out
    start = picture.read_bytes()[:8]
    assert start.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")


def test_a_server_is_asked_with_the_admin_key(manager: VTensorManager) -> None:
    with loopback({"/admin/memory": Reply(memory_map(manager))}) as server:
        code, out, _ = invoke("--url", server.url, "--admin-api-key", "root")
    ((_, _, headers),) = server.seen
    assert (code, headers["Authorization"]) == (0, "Bearer root")
    assert "of 1.0 MiB" in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "map.json: this is not a memory map of flexinfer serve: it lacks 'chunk_bytes'"),
        ("[1]", "not a memory map of flexinfer serve: it is a list, not an object"),
        ('{"chunk_bytes": "x"}', "not a memory map of flexinfer serve: its values are of other"),
        ("x", "not JSON"),
        ('{"vtensors": [], "prefixes": []}', "save what GET /admin/memory answers"),
    ],
)
def test_a_file_that_is_no_map_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(text)
    code, _, err = invoke("--file", str(file))
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("replay", "/nonexistent"), "cannot use /nonexistent: there is no such file or folder"),
        (("inspect", "--file", "/nonexistent"), "there is no such file or folder; check the path"),
        (("inspect", "--file", "/"), "it is a folder; name a file"),
        (("demo", "--trace", "/nonexistent/x"), "--trace: the folder of '/nonexistent/x'"),
        (("serve", "--chat-template", "/nonexistent"), "'/nonexistent': there is no such file"),
        (("top", "--once", "--url", "http://127.0.0.1:9"), "Start one with `flexinfer serve`"),
    ],
)
def test_what_cannot_be_opened_is_said_with_what_to_do(
    arguments: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Errno" not in result.stderr
    assert result.stderr.count("\n") == 1
