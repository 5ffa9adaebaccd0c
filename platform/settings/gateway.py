"""The settings of one subject: how clients reach the gateway, and what it accepts of them."""

from dataclasses import dataclass
from pathlib import Path

from graftwork.platform.settings.setting import setting
from graftwork.platform.settings.values import (
    one_of,
    parse_networks,
    parse_origins,
    parse_path,
    parse_text,
    seconds,
    whole,
)


@dataclass(frozen=True)
class GatewaySettings:
    """How clients reach the gateway, and what it accepts of them."""

    host: str = setting("127.0.0.1", parse_text)
    port: int = setting(8000, whole(0, 65535))
    """The port of the gateway, 0 to 65535; 0 takes a free port."""
    tls_cert: Path | None = setting(None, parse_path)
    """A PEM file with the certificate chain of the gateway, which then serves HTTPS. It needs `tls_key`."""
    tls_key: Path | None = setting(None, parse_path)
    """A PEM file with the private key of `tls_cert`, without a password."""
    metrics_host: str = setting("127.0.0.1", parse_text)
    metrics_port: int | None = setting(None, whole(0, 65535))
    """A second port that serves `/metrics` without a key; 0 takes a free one. None opens no such port."""
    cors_origin: tuple[str, ...] = setting((), parse_origins)
    """The origins, such as `https://chat.example.com`, whose web pages may call the gateway; `*` allows all.

    The variable has them with commas between. Without any, browsers refuse the answers to pages of other origins.
    """
    max_connections_per_address: int = setting(512, whole(0))
    """HTTP connections that one address may hold; 0 sets no limit. Addresses of this machine have no limit."""
    max_wrong_keys: int = setting(20, whole(1))
    """Wrong API keys that one address may send at once. It may send one more each second."""
    request_timeout_s: float = setting(3600.0, seconds(0.1, 604800))
    """The most seconds of one request or turn, with its time in the queue; then it ends with a 504."""
    lease_s: float = setting(30.0, seconds(1, 3600))
    """Seconds, 1 to 3600, after which others may have what a dead gateway held, such as places in limits."""
    max_uploads: int = setting(8, whole(1))
    max_tenant_uploads: int = setting(4, whole(1))
    """Uploads that the gateway, or one tenant, has in flight at most, at least 1. Each needs up to 512 MiB of disk."""
    upload_timeout_s: float = setting(1800.0, seconds(1, 86400))
    """Seconds, 1 to 86400, in which the body of an upload must arrive; then it ends with a 408."""
    webhook_networks: tuple[str, ...] = setting((), parse_networks)
    """Networks, such as `10.1.0.0/16`, that webhooks may lead to although they are not public.

    The variable has them with commas between. Without any, webhooks reach public addresses only.
    """
    adapter_grace_s: float = setting(86_400.0, seconds(0, 31_536_000))
    """Seconds, 0 to 31536000, for which an adapter that was deleted can be restored; 0 erases it at once."""
    reasoning_form: str = setting("auto", one_of("auto", "none", "think", "mistral", "cohere", "seed", "thinking"))
    """How the model writes its reasoning: `auto`, `none`, `think`, `mistral`, `cohere`, `seed` or `thinking`.

    `auto` takes the tags that the model's chat template has, such as `<think>`; `none` tells no reasoning from the answer.
    """
    tool_call_form: str = setting("auto", one_of("auto", "hermes", "qwen", "llama3_json", "mistral", "pythonic"))
    """How the model writes tool calls: `auto`, `hermes`, `qwen`, `llama3_json`, `mistral` or `pythonic`.

    `auto` takes the form that the model's chat template shows.
    """
