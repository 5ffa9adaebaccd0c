"""Tests of the metrics of a fleet's engines."""

from prometheus_client import CollectorRegistry, generate_latest

from graftwork.platform.replica_collector import MAX_REPLICA_LABELS, OTHER, ReplicaCollector, ReplicaFigures


def shown(figures: list[ReplicaFigures]) -> dict[str, float]:
    """Every sample by its name and labels."""
    registry, collector = CollectorRegistry(), ReplicaCollector()
    registry.register(collector)
    collector.observe(figures)
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_each_engine_has_its_figures() -> None:
    """Gauges and counters carry the engine's id, and an engine that is not ready shows 0."""
    found = shown(
        [
            ReplicaFigures("a", is_ready=True, running_requests=3, requests=7),
            ReplicaFigures("b", slowness=4.5, first_token_s=0.25),
        ]
    )

    assert found['graftwork_replica_ready{replica="a"}'] == 1
    assert found['graftwork_replica_ready{replica="b"}'] == 0
    assert found['graftwork_replica_running_requests{replica="a"}'] == 3
    assert found['graftwork_replica_requests_total{replica="a"}'] == 7
    assert found['graftwork_replica_slowness{replica="b"}'] == 4.5
    assert found['graftwork_replica_first_token_seconds{replica="b"}'] == 0.25


def test_labels_are_bounded_and_nothing_is_left_out() -> None:
    """With three engines too many, these three share one label, and the sum over all labels stays right."""
    figures = [ReplicaFigures(f"engine-{number:03}", requests=number) for number in range(MAX_REPLICA_LABELS + 3)]

    requests = {name: value for name, value in shown(figures).items() if "replica_requests" in name}

    assert len(requests) == MAX_REPLICA_LABELS + 1
    assert requests[f'graftwork_replica_requests_total{{replica="{OTHER}"}}'] == sum(
        range(MAX_REPLICA_LABELS, MAX_REPLICA_LABELS + 3)
    )
    assert sum(requests.values()) == sum(range(MAX_REPLICA_LABELS + 3))


def test_without_a_fleet_there_is_nothing() -> None:
    """A gateway with one engine has no metrics with an engine's label."""
    assert shown([]) == {}
