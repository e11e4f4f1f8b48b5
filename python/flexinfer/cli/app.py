"""The commands of `flexinfer` and their options. Each imports what it needs when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexinfer.cli.bench.command import bench
from flexinfer.cli.doctor.command import doctor
from flexinfer.cli.errors import usage_errors
from flexinfer.cli.help import WholeNames
from flexinfer.cli.inspect.command import inspect
from flexinfer.cli.option_model import command_of
from flexinfer.cli.options import COMPILE_HELP, THREADS_HELP, AdminKey, ApiKey
from flexinfer.cli.replay import replay
from flexinfer.cli.serve.command import serve
from flexinfer.cli.serve.options import ServeOptions
from flexinfer.cli.settings import EngineSettings
from flexinfer.cli.top.command import top

if TYPE_CHECKING:
    from flexinfer.cli.chat.backend import Partner

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM serving on a KV cache made of virtual memory.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option(help="Folder or hub id of a causal model; without it, the small one shipped."),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the model's own).")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N; without it, a GPU if there is one."),
]
ChunkBytes = Annotated[
    str | None,
    typer.Option(help="Bytes of one physical chunk, such as 64KiB or 2MiB."),
]
LayersPerPlane = Annotated[
    int | None,
    typer.Option(help="1: each layer in ranges of its own; without it, all layers side by side."),
]
Memory = Annotated[
    str | None,
    typer.Option(help="Budget of KV memory, such as 256MiB; without it, half of what is free."),
]
Trace = Annotated[
    Path | None,
    typer.Option(help="Record every memory operation, for `flexinfer replay`. Holds the tokens."),
]
AttentionName = Annotated[
    str, typer.Option("--attention-backend", help="auto, flash, host or sdpa.")
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="On a GPU: no CUDA graphs for decoding.")
]
GpuShare = Annotated[
    float,
    typer.Option("--gpu-memory-utilization", help="Part of a GPU for weights, activations and KV."),
]
Threads = Annotated[int | None, typer.Option(help=THREADS_HELP)]
Compile = Annotated[bool, typer.Option("--compile", help=COMPILE_HELP)]
Seed = Annotated[int, typer.Option(help="Of sampling; in the demo, also which conversations.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"flexinfer {version('flexinfer')}")
        raise typer.Exit


@app.callback()
def _flexinfer(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=WholeNames)
def demo(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1, help="How many run together.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each conversation.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 48,
    dtype: Dtype = "float32",
    device: Device = None,
    chunk_bytes: ChunkBytes = None,
    layers_per_plane: LayersPerPlane = None,
    memory: Memory = None,
    seed: Seed = 0,
    trace: Trace = None,
    attention_backend: AttentionName = "auto",
    enforce_eager: EnforceEager = False,
    gpu_memory_utilization: GpuShare = 0.9,
    threads: Threads = None,
    compile_model: Compile = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw memory over time into this file (.png, .svg, .pdf)."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write every number into this file."),
    ] = None,
) -> None:
    """Several chats that share a long system prompt, run together, and what that saves."""
    with usage_errors():
        from flexinfer.cli.demo.command import Demo, DemoSettings

        engine = EngineSettings(
            model,
            dtype,
            device,
            chunk_bytes,
            layers_per_plane,
            memory,
            seed,
            conversations,
            trace,
            attention_backend,
            enforce_eager,
            gpu_memory_utilization,
            threads,
            compile_model,
        )
        settings = DemoSettings(engine, conversations, turns, max_tokens, plot, json)
        opened = Demo(settings)
    raise typer.Exit(opened.run())


@app.command(cls=WholeNames)
def chat(
    model: Model = None,
    system: Annotated[
        str | None,
        typer.Option(help="System prompt; '' for none."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k most probable tokens; 0: all.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less repetition.")] = 1.0,
    dtype: Dtype = "auto",
    device: Device = None,
    chunk_bytes: ChunkBytes = None,
    layers_per_plane: LayersPerPlane = None,
    memory: Memory = None,
    seed: Seed = 0,
    trace: Trace = None,
    attention_backend: AttentionName = "auto",
    enforce_eager: EnforceEager = False,
    gpu_memory_utilization: GpuShare = 0.9,
    threads: Threads = None,
    compile_model: Compile = False,
    url: Annotated[
        str | None,
        typer.Option(help="Talk to the server there instead; --model is then a served name."),
    ] = None,
    api_key: ApiKey = None,
    admin_api_key: AdminKey = None,
) -> None:
    """Talk to a model at the terminal; each turn reuses the KV cache of the turns before."""
    with usage_errors():
        from flexinfer.cli.chat.command import Chat
        from flexinfer.sampling.params import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
        )
        partner: Partner
        if url is not None:
            from flexinfer.cli.chat.remote import RemotePartner

            partner = RemotePartner(url, model, api_key, admin_api_key)
        else:
            from flexinfer.cli.chat.local import LocalPartner

            engine = EngineSettings(
                model,
                dtype,
                device,
                chunk_bytes,
                layers_per_plane,
                memory,
                seed,
                trace=trace,
                attention_backend=attention_backend,
                enforce_eager=enforce_eager,
                gpu_memory_utilization=gpu_memory_utilization,
                threads=threads,
                compile=compile_model,
            )
            if system is None and engine.is_shipped:
                from flexinfer.cli.demo.script import load_script

                system = load_script(engine.folder, 1, 1, 0).system_prompt
            partner = LocalPartner(engine)
        opened = Chat(partner, params, system or "")
    opened.run()


app.command(cls=WholeNames)(replay)
app.command(cls=WholeNames)(inspect)
app.command(cls=WholeNames)(top)
app.command(cls=WholeNames)(doctor)
app.command(cls=WholeNames)(command_of(ServeOptions, serve))
app.add_typer(bench)


def main() -> None:
    """Entry point of the `flexinfer` command."""
    app()
