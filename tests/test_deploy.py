"""Tests of what deploys Graftwork: the images, the compose file and the Helm chart agree with the program.

No cluster and no Docker are needed: the chart is rendered by Helm itself, its objects are held against Kubernetes' own
schemas, and each command line and each variable against the program's.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import typer.main
import yaml  # type: ignore[import-untyped]

from graftwork.api.cli.main import build_app
from graftwork.platform.monitoring.metric_list import unknown_names
from graftwork.platform.settings.settings import Settings
from tests.tree import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "graftwork"
KUBERNETES = "1.33.0"
LEAST = {"model": {"claim": "models", "folder": "llama"}, "artifacts": {"claim": "adapters"}, "secret": "graftwork"}
EVERYTHING = LEAST | {
    "artifacts": {"create": True},
    "engineTls": {"secret": "engine-tls", "name": "engines.internal"},
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "gateway": {"env": {"GRAFTWORK_LEASE_S": 60}, "nodeSelector": {"pool": "cpu"}},
    "engine": {"gpus": 4, "tolerations": [{"key": "gpu", "operator": "Exists"}], "kv": {"storageClass": "fast"}},
}
ON_CPUS = LEAST | {"engine": {"gpus": 0}}
PROGRAMS = Path(sys.executable).parent
RESOURCES_OF_OTHERS = {"ScaledObject", "PodMonitor"}
"""Kinds of the chart that are not Kubernetes' own."""

Manifest = Mapping[str, Any]


def run(program: str, *arguments: str | Path, values: object = None) -> "subprocess.CompletedProcess[str]":
    """Runs an installed program. `values` come to Helm by standard input."""
    command = [str(PROGRAMS / program), *map(str, arguments)]
    text = None if values is None else json.dumps(values)
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def rendered(values: object) -> list[Manifest]:
    """The objects that the chart makes of these values."""
    done = run("helm", "template", "prod", CHART, "--namespace", "ai", "--values", "-", values=values)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def containers(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """The containers of all stateful sets, by name."""
    specs = [one["spec"]["template"]["spec"] for one in manifests if one["kind"] == "StatefulSet"]
    return {container["name"]: container for spec in specs for container in spec["containers"]}


@pytest.mark.parametrize("values", [LEAST, EVERYTHING, ON_CPUS], ids=["least", "everything", "on-cpus"])
def test_the_chart_makes_objects_that_kubernetes_accepts(values: dict[str, Any]) -> None:
    """Helm's linter finds no fault, and each object fits the schema of its kind, without unknown fields."""
    lint = run("helm", "lint", "--strict", CHART, "--values", "-", values=values)
    manifests = rendered(values)

    assert lint.returncode == 0, lint.stdout
    assert {one["kind"] for one in manifests} >= {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    for manifest in manifests:
        if manifest["kind"] not in RESOURCES_OF_OTHERS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("spoiled", "named"),
    [
        ({key: value for key, value in LEAST.items() if key != "secret"}, "secret"),
        (LEAST | {"model": {"claim": "models"}}, "folder"),
        (LEAST | {"artifacts": {}}, "artifacts"),
        (LEAST | {"gateways": {}}, "gateways"),
        (LEAST | {"engine": {"gpus": 9}}, "gpus"),
        (LEAST | {"engine": {"replica": 1}}, "replica"),
    ],
)
def test_wrong_values_are_refused_by_name(spoiled: dict[str, Any], named: str) -> None:
    """A missing, unknown or impossible value stops the installation with its name."""
    done = run("helm", "template", "prod", CHART, "--values", "-", values=spoiled)

    assert done.returncode != 0
    assert named in done.stderr


@pytest.mark.parametrize("values", [LEAST, EVERYTHING, ON_CPUS], ids=["least", "everything", "on-cpus"])
def test_the_chart_s_commands_and_variables_are_the_program_s(values: dict[str, Any]) -> None:
    """Each container's arguments are parsed by the command line, and its variables by the settings."""
    by_name = containers(rendered(values))

    for name, container in by_name.items():
        check_command(container["args"])
        settings = settings_of({one["name"]: one.get("value", SECRETS.get(one["name"])) for one in container["env"]})
        assert container["args"][0] == name
        assert settings.model == Path("/models/llama")
    engine = by_name["engine"]
    for probe in (engine["readinessProbe"], engine["startupProbe"]):
        program, *command = probe["exec"]["command"]
        assert program == "graftwork"
        check_command(command)
        assert command[-1].split(":")[1] == str(engine["ports"][0]["containerPort"])
        assert probe["timeoutSeconds"] > 10, "the probe itself waits for ten seconds"


def test_volumes_selectors_and_names_fit_each_other() -> None:
    """Each mount has a volume, each selector finds its pods, and each engine advertises the name of its pod."""
    manifests = rendered(EVERYTHING)
    sets = {one["metadata"]["name"]: one for one in manifests if one["kind"] == "StatefulSet"}

    for stateful in sets.values():
        spec = stateful["spec"]["template"]["spec"]
        offered = {volume["name"] for volume in spec["volumes"]}
        offered |= {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
        mounts = [mount for container in spec["containers"] for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == offered
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
    for selector in selectors_of(manifests):
        labels = [one["spec"]["template"]["metadata"]["labels"] for one in sets.values()]
        assert len([found for found in labels if selector.items() <= found.items()]) == 1
    (engine,) = [one for name, one in sets.items() if name.endswith("engine")]
    (advertised,) = [part for part in containers([engine])["engine"]["args"] if part.startswith("--advertise=")]
    assert advertised == f"--advertise=$(POD_NAME).{engine['spec']['serviceName']}.ai.svc:9000"


def selectors_of(manifests: Sequence[Manifest]) -> Iterator[Mapping[str, str]]:
    """Every label selector of the chart."""
    for manifest in manifests:
        spec = manifest["spec"]
        match manifest["kind"]:
            case "Service":
                yield spec["selector"]
            case "StatefulSet" | "PodDisruptionBudget" | "PodMonitor":
                yield spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                yield spec["podSelector"]["matchLabels"]
                yield spec["ingress"][0]["from"][0]["podSelector"]["matchLabels"]


def test_keda_asks_for_metrics_that_exist() -> None:
    """The autoscaler asks for the signals of a fleet, and each series and label in a query is one that a gateway
    shows, or one by which Prometheus tells the gateways of this release.
    """
    (scaled,) = [one for one in rendered(EVERYTHING) if one["kind"] == "ScaledObject"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    own = [re.sub(r'\{namespace="ai", service="[\w-]+-gateway"\}', "", query) for query in queries]

    assert [query for query in own if "{" in query] == []
    assert {query: names for query in own if (names := unknown_names(query))} == {}
    assert [re.findall(r"graftwork_\w+", query) for query in own] == [
        ["graftwork_replica_queued_tokens"],
        ["graftwork_kv_usage_ratio"],
        ["graftwork_adapter_loads_total"],
        ["graftwork_replica_first_token_seconds", "graftwork_replica_ready"],
        ["graftwork_time_to_first_token_seconds_bucket"],
    ]


def test_the_images_are_built_without_a_fault() -> None:
    """The linter of Dockerfiles is content, and each image's command is one of the program's."""
    done = run("hadolint", DEPLOY / "Dockerfile")
    text = (DEPLOY / "Dockerfile").read_text()
    commands = [json.loads(found) for found in re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)]
    checks = [json.loads(found) for found in re.findall(r"CMD (\[\"graftwork\".*\])$", text, re.MULTILINE)]

    assert done.returncode == 0, done.stdout
    assert len(commands) == 2
    assert len(checks) == 1
    for command in (*commands, *(check[1:] for check in checks)):
        check_command(command)
    for lock in re.findall(r"requirements/\w+\.lock", text):
        assert (ROOT / lock).is_file()


def test_what_the_images_copy_holds_every_room() -> None:
    """No room, no file of the build and no lock is left out of what Docker sees."""
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    rooms = {link.readlink().name for link in (ROOT / "src" / "graftwork").iterdir() if link.is_symlink()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert rooms <= shown
    assert {"src", "requirements", "pyproject.toml", project["readme"], *project["license-files"]} <= shown


def test_the_compose_file_fits_the_program() -> None:
    """Commands, variables, volumes, dependencies and the names that engines advertise are right."""
    compose = yaml.load((DEPLOY / "compose.yaml").read_text(), Loader=ComposeLoader)
    services = compose["services"]

    own = {name: service for name, service in services.items() if name.startswith(("gateway", "engine"))}
    assert len(own) == 4
    for name, service in own.items():
        variables = {key: filled(str(value)) for key, value in service["environment"].items()}
        settings = settings_of(variables)
        assert settings.fleet == "leases"
        assert set(service["depends_on"]) <= services.keys()
        assert service["hostname"] == name
        named = {volume.split(":")[0] for volume in service["volumes"] if not volume.startswith("$")}
        assert named <= compose["volumes"].keys()
        if "command" in service:
            check_command(service["command"])
            assert service["command"][-4:] == ["--advertise", f"{name}:9000", "--replica-id", name]


def test_the_example_names_every_variable_of_the_compose_file() -> None:
    """Whoever fills in the example has filled in all."""
    text = (DEPLOY / "compose.yaml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", text))
    offered = set(re.findall(r"^(\w+)=", (DEPLOY / "example.env").read_text(), re.MULTILINE))

    assert used == offered


class ComposeLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads Compose's own tags as nothing."""


ComposeLoader.add_constructor("!reset", lambda _loader, _node: None)

SECRETS = {
    "GRAFTWORK_DATABASE_URL": "postgresql://graftwork@db/graftwork",
    "GRAFTWORK_REDIS_URL": "redis://redis:6379/0",
    "GRAFTWORK_ENGINE_TOKEN": "a-token-that-is-long-enough",
    "GRAFTWORK_ADMIN_KEY": "an-admin-key",
    "GRAFTWORK_PEPPER": "a-pepper",
}


def filled(text: str) -> str:
    """A value of the compose file with something in place of each variable."""
    return re.sub(r"\$\{\w+[^}]*\}", "something-long-enough", text)


def settings_of(variables: Mapping[str, str | None]) -> Settings:
    """The settings of a container. Every variable with our prefix must be a setting, and its value one of its kind."""
    ours = {name: value for name, value in variables.items() if name.startswith("GRAFTWORK_")}
    return Settings.from_environment({name.removeprefix("GRAFTWORK_").lower(): value for name, value in ours.items()})


def check_command(arguments: Sequence[str]) -> None:
    """Parses a command line without running it. Fails for an unknown command or option."""
    group = typer.main.get_command(build_app())
    name, command, rest = group.resolve_command(group.make_context("graftwork", list(arguments)), list(arguments))  # type: ignore[attr-defined]
    command.make_context(name, rest)
