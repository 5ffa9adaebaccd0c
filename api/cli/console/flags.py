"""Defines the flags that the server commands share, each of which overrides the GRAFTWORK_ variable with the same name,
and reads values of flags.

Never defines a default: a missing flag is None, and the settings supply the value.
"""

import re
from pathlib import Path
from typing import Annotated

import typer

Demo = Annotated[
    bool, typer.Option("--demo", help="Serve the small model that ships with Graftwork, with three tenants ready.")
]
ModelPlace = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="DIR|hf:NAME@REV|s3://…",
        help="The base model: its folder, its name and revision on the Hugging Face Hub, or a bucket and prefix.",
    ),
]
Host = Annotated[str | None, typer.Option(help="The address to listen at (default: 127.0.0.1).")]
Port = Annotated[int | None, typer.Option(help="The port to listen at; 0 takes a free one (default: 8000).")]
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificate chain in PEM form; with --tls-key the server speaks HTTPS."),
]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="The private key of --tls-cert in PEM form.")]
EngineTlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The authority that signs the certificates of engines and gateways; with it they speak TLS to each other.",
    ),
]
EngineTlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificate of this engine or gateway, signed by --engine-tls-ca."),
]
EngineTlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="The private key of --engine-tls-cert.")]
EngineTlsName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The name in all engines' certificates (default: the host in each address)."),
]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where keys, adapters and the database lie (default: ./graftwork-data)."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="postgresql://… or sqlite+aiosqlite:///… (default: a file in the data dir)."),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where several gateways share their limits (default: in this process)."),
]
ReasoningForm = Annotated[
    str | None,
    typer.Option(
        metavar="FORM",
        help="The tags of the model's reasoning: think, mistral, cohere, seed, thinking or none (default: by its template).",
    ),
]
ToolForm = Annotated[
    str | None,
    typer.Option(
        metavar="FORM",
        help="How the model writes tool calls: hermes, qwen, llama3_json, mistral or pythonic (default: by its template).",
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda (default: auto).")]
TensorParallel = Annotated[
    int | None, typer.Option(metavar="N", help="Devices that compute the model together, 1 to 8 (default: 1).")
]
EngineCores = Annotated[
    str | None,
    typer.Option(
        metavar="CORES",
        help="The cores that engines keep to, e.g. 1 or 2-7; the gateway takes the others (default: the system decides).",
    ),
]
DeviceBytes = Annotated[
    str | None,
    typer.Option(
        "--device-bytes",
        "--device-kv-bytes",
        metavar="SIZE",
        help="Memory for the cache and for adapters on the device, e.g. 2GiB (default: 768MiB; on a GPU by --memory-share).",
    ),
]
MemoryShare = Annotated[
    float | None,
    typer.Option(help="The part of a GPU's memory to take of what the weights leave free, up to 1 (default: 0.9)."),
]
Kernels = Annotated[
    str | None, typer.Option(help="What computes: auto, triton (GPU), native (CPU) or torch (default: auto).")
]
MaxContextTokens = Annotated[
    int | None, typer.Option(help="The longest context that is served, in tokens (default: the model's own).")
]
HostKvBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for the cache on the host, e.g. 2GiB.")]
DiskKvBytes = Annotated[str | None, typer.Option(metavar="SIZE", help="Disk for the cache, e.g. 20GiB.")]
RenewCalibration = Annotated[
    bool,
    typer.Option(
        "--renew-calibration", help="Measure this machine and hash the model again, not only at the first start."
    ),
]
PublicPrompts = Annotated[
    Path | None, typer.Option(metavar="PATH", help="System prompts, as text files, whose cache all tenants share.")
]
KvDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Where the cache on disk lies, of one engine alone (default: kv in the data dir)."
    ),
]
SharedKvDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A folder in which engines of one model read each other's cache (default: none)."),
]
ArtifactUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="A bucket that stores adapters: s3://BUCKET/PREFIX (default: in the data dir)."),
]
KvObjectUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A bucket in which engines of one model share their cache: s3://BUCKET/PREFIX (default: none).",
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="An origin whose web pages may call the server, e.g. https://chat.example.com; may be repeated (default: none).",
    ),
]
MaxDraftTokens = Annotated[
    int | None, typer.Option(help="Tokens guessed for a request in one step; 0: no speculation (default: 16).")
]
DraftModelPlace = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="DIR|hf:NAME@REV|s3://…",
        help="A small model with the same tokenizer, which guesses tokens where that pays (default: none).",
    ),
]
DraftHeadPlace = Annotated[
    str | None,
    typer.Option(
        "--draft-head",
        metavar="DIR|hf:NAME@REV|s3://…",
        help="An EAGLE-3 head of the model, which guesses tokens where that pays (default: none).",
    ),
]
DraftKvBytes = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Device memory for the KV of the draft model or head (default: 256MiB)."),
]
LogFormat = Annotated[
    str | None, typer.Option(metavar="FORM", help="auto, json or text (default: text at a terminal, JSON elsewhere).")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Where traces go, e.g. http://collector:4318; needs the extra otel (default: nowhere)."
    ),
]
EngineAddress = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET", help="The engine's gRPC address, unix:PATH or HOST:PORT; several with commas between."
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Engines on this machine (default: 1). 0 with --max-replicas: none while there are no requests.",
    ),
]
MaxReplicas = Annotated[
    int | None, typer.Option(metavar="N", help="The most engines: with it, their number follows their load.")
]
Fleet = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="static: the engines that are named or started here; leases: all that share the database (default: static).",
    ),
]
ReplicaId = Annotated[
    str | None, typer.Option(metavar="ID", help="The engine's name among the replicas (default: by its address).")
]
ServedModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="The base model's name for clients (default: its folder's name).")
]
Generation = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="The engine's generation: the next one may have other weights or versions (default: 1)."
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(metavar="TARGET", help="Where gateways reach the engine (default: where it listens)."),
]


def sent_moment(text: str | None) -> float | str | None:
    """Returns a time as the body of a request has it: Unix seconds as a number, and other text unchanged.

    Nine digits and more are seconds, as of 1973. Eight are a day in ISO 8601, such as 20300131.
    """
    if text is not None and re.fullmatch(r"[0-9]{9,}(\.[0-9]+)?", text):
        return float(text)
    return text


def given(value: object) -> object:
    """Returns the value of a flag; None if the flag is missing, because its environment variable then decides."""
    return None if value is False or value == [] else value
