"""What is made around the RayService: routes, policies, budgets, monitoring, notes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from deployments.dashboards.recording import LEAST_TARGET, SloTargets
from deployments.dashboards.rule_files import RUNBOOKS, rule_files
from tests.helm.rendered_chart import (
    CHART,
    cluster,
    group,
    merged,
    notes,
    objects,
    of_kind,
    plain,
    ray_service,
    refusal,
    scenario,
    templates,
)

KEYS = {"apiKeys": {"enabled": True, "existingSecret": "keys", "client": {"secretName": "client"}}}


def test_the_service_is_what_routes_point_to() -> None:
    values = {
        "ingress": {"enabled": True, "host": "a.b"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    }
    service = ray_service(values)["spec"]["serveService"]
    (ingress,) = of_kind("Ingress", values)
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    (route,) = of_kind("HTTPRoute", values)
    (port,) = service["spec"]["ports"]
    expected = {"name": service["metadata"]["name"], "port": port["port"]}
    assert {"name": backend["name"], "port": backend["port"]["number"]} == expected
    assert route["spec"]["rules"][0]["backendRefs"] == [expected]
    assert (port["name"], port["targetPort"]) == ("serve", 8000)


def test_everybody_asks_the_service_for_the_port_that_the_operator_gives_it() -> None:
    (head,) = [pod for name, pod in templates(cluster()) if name == "head"]
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    service = ray_service()["spec"]["serveService"]["spec"]
    assert ports["serve"] == service["ports"][0]["port"]
    (pod,) = of_kind("Pod")
    url = next(one["value"] for one in pod["spec"]["containers"][0]["env"] if one["name"] == "URL")
    assert url.endswith(f":{ports['serve']}")
    assert f"8000:{ports['serve']}" in notes()


def test_an_ingress_ends_tls() -> None:
    (ingress,) = of_kind("Ingress", {"ingress": {"enabled": True, "host": "a.b", "tlsSecretName": "cert"}})
    assert ingress["spec"]["tls"] == [{"hosts": ["a.b"], "secretName": "cert"}]


def test_an_ingress_may_be_for_all_names_of_a_domain() -> None:
    """Without quotes YAML would take the star for an alias."""
    values = {"ingress": {"enabled": True, "host": "*.a.b", "tlsSecretName": "cert"}}
    (ingress,) = of_kind("Ingress", values)
    assert ingress["spec"]["tls"] == [{"hosts": ["*.a.b"], "secretName": "cert"}]
    assert ingress["spec"]["rules"][0]["host"] == "*.a.b"


def test_requests_may_be_kept_from_the_head() -> None:
    assert ray_service({"service": {"excludeHead": True}})["spec"]["excludeHeadPodFromServeSvc"] is True


def test_the_network_is_closed_but_to_the_operator_and_themselves() -> None:
    (policy,) = of_kind("NetworkPolicy", {"networkPolicy": {"enabled": True}})
    sources = [source for rule in policy["spec"]["ingress"] for source in rule["from"]]
    assert len(sources) == 2
    assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_clients_reach_the_api_only() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    (policy,) = of_kind("NetworkPolicy", {"networkPolicy": {"enabled": True, "clients": clients}})
    (rule,) = [rule for rule in policy["spec"]["ingress"] if rule["from"] == clients]
    assert [port["port"] for port in rule["ports"]] == [8000]


def dns_rule(**dns: Any) -> dict[str, Any]:
    egress = {"enabled": True, "dns": dns}
    values = {"autoscaler": {"enabled": False}, "networkPolicy": {"enabled": True, "egress": egress}}
    (policy,) = of_kind("NetworkPolicy", values)
    return dict(policy["spec"]["egress"][1])


def test_questions_of_dns_may_leave() -> None:
    assert dns_rule() == {
        "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
        "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
    }


def test_dns_may_be_elsewhere() -> None:
    peers = [{"ipBlock": {"cidr": "169.254.20.10/32"}}]
    found = dns_rule(peers=peers, ports=[5353])
    assert found["to"] == peers
    assert [port["port"] for port in found["ports"]] == [5353, 5353]


def test_the_controller_of_the_air_gapped_ingress_reaches_the_api() -> None:
    (policy,) = of_kind("NetworkPolicy", scenario("air-gapped"))
    (ingress,) = of_kind("Ingress", scenario("air-gapped"))
    allowed = [
        source["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in policy["spec"]["ingress"]
        for source in rule["from"]
        if "namespaceSelector" in source
    ]
    assert f"ingress-{ingress['spec']['ingressClassName']}" in allowed


def labels_of_expressions() -> set[str]:
    """What alerts and the series that they look at are told apart by."""
    texts = "".join(rule_files(SloTargets()).values())
    return {
        label.strip() for found in re.findall(r"\b(?:by|on) \(([^)]+)\)", texts) for label in found.split(",")
    }


@pytest.mark.parametrize("label", sorted(labels_of_expressions()))
def test_no_label_of_all_alerts_is_one_that_tells_them_apart(label: str) -> None:
    """Of two tiers that burn at once Prometheus would evaluate neither: the same labels would come twice."""
    message = refusal({"monitoring": {"rules": {"enabled": True, "alertLabels": {label: "a"}}}})
    assert "/monitoring/rules/alertLabels" in message
    assert label in message


def test_notes_give_the_test_as_long_as_it_waits() -> None:
    """And a pod some time to start: Helm's own limit is 5 minutes."""
    assert "helm test demo --namespace serving --timeout 1500s" in notes({"tests": {"timeoutSeconds": 1200}})


def test_notes_tell_that_the_test_needs_a_key() -> None:
    without = merged(KEYS, {"apiKeys": {"client": {"secretName": ""}}})
    assert "apiKeys.client.secretName" in notes(without)
    assert "apiKeys.client.secretName" not in notes(KEYS)
    assert "apiKeys.client.secretName" not in notes()


def test_notes_tell_that_rules_are_about_what_nobody_scrapes() -> None:
    rules = {"enabled": True}
    assert "monitoring.rules.job" in notes({"monitoring": {"rules": rules}})
    assert "monitoring.rules.job" not in notes({"monitoring": {"rules": {**rules, "job": "flotilla"}}})
    assert "monitoring.rules.job" not in notes({"monitoring": {"rules": rules, "podMonitor": rules}})


def test_notes_tell_that_a_policy_may_cut_off_the_ingress() -> None:
    routed = merged(KEYS, {"ingress": {"enabled": True}})
    assert "Ingress controller" in notes(merged(routed, {"networkPolicy": {"enabled": True}}))
    assert "Ingress controller" not in notes(routed)
    incremental = {
        "upgrade": {"type": "NewClusterWithIncrementalUpgrade", "incremental": {"gatewayClassName": "a"}},
        "tests": {"enabled": False},
    }
    assert "Gateway's pods" in notes(merged(KEYS, incremental, {"networkPolicy": {"enabled": True}}))
    assert "Gateway's pods" not in notes(merged(KEYS, incremental))


def test_the_network_policy_and_the_budgets_are_about_the_pods() -> None:
    values = merged(
        group(podDisruptionBudget={"minAvailable": 1}),
        {"networkPolicy": {"enabled": True}, "head": {"podDisruptionBudget": {"enabled": True}}},
    )
    labels = {name: pod["metadata"]["labels"] for name, pod in templates(cluster(values))}
    (policy,) = of_kind("NetworkPolicy", values)
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected <= found.items() for found in labels.values())
    budgets = of_kind("PodDisruptionBudget", values)
    for name, budget in zip(("head", "cpu"), budgets, strict=True):
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels[name].items()


def test_budgets_are_of_what_kubernetes_can_count_of_a_ray_cluster() -> None:
    values = merged(
        group(podDisruptionBudget={"minAvailable": 1}), {"head": {"podDisruptionBudget": {"enabled": True}}}
    )
    for budget in of_kind("PodDisruptionBudget", values):
        assert budget["spec"]["minAvailable"] == 1
        assert "maxUnavailable" not in budget["spec"]


def test_nothing_holds_up_the_drain_of_a_node_unless_asked_for() -> None:
    assert not of_kind("PodDisruptionBudget")


def test_notes_tell_when_a_drain_will_wait() -> None:
    budget = group(podDisruptionBudget={"minAvailable": 1})
    assert "Warning: drains of nodes wait for pods of cpu" in notes(merged(KEYS, budget))
    assert "drains of nodes" not in notes(
        merged(KEYS, group(minReplicas=2, podDisruptionBudget={"minAvailable": 1}))
    )


def test_flotillas_metrics_are_scraped_once() -> None:
    monitor = of_kind("PodMonitor", {"monitoring": {"podMonitor": {"enabled": True}}})[0]
    assert monitor["spec"]["selector"]["matchLabels"]["ray.io/node-type"] == "head"
    assert [one["path"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["/metrics"]


def test_prometheus_has_a_key_of_its_own() -> None:
    metrics = {"secretName": "metrics", "key": "token"}
    values = merged(KEYS, {"monitoring": {"podMonitor": {"enabled": True, "authorization": metrics}}})
    (endpoint,) = of_kind("PodMonitor", values)[0]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "metrics", "key": "token"}
    (pod,) = of_kind("Pod", values)
    (key,) = [one for one in pod["spec"]["containers"][0]["env"] if one["name"] == "API_KEY"]
    assert key["valueFrom"]["secretKeyRef"] == {"name": "client", "key": "api-key"}


def test_a_key_of_prometheus_alone_is_enough() -> None:
    keys = {"apiKeys": {"enabled": True, "existingSecret": "keys"}}
    monitor = {"enabled": True, "authorization": {"secretName": "metrics"}}
    assert of_kind("PodMonitor", merged(keys, {"monitoring": {"podMonitor": monitor}}))


def test_scrapes_are_bounded_and_series_left_out() -> None:
    dropped = [{"action": "drop", "sourceLabels": ["__name__"], "regex": "ray_.*"}]
    monitor = {"enabled": True, "scrapeTimeout": "15s", "metricRelabelings": dropped}
    for found in of_kind("PodMonitor", {"monitoring": {"podMonitor": monitor}}):
        (endpoint,) = found["spec"]["podMetricsEndpoints"]
        assert endpoint["scrapeTimeout"] == "15s"
        assert endpoint["metricRelabelings"] == dropped
    plain = of_kind("PodMonitor", {"monitoring": {"podMonitor": {"enabled": True}}})
    assert all("scrapeTimeout" not in found["spec"]["podMetricsEndpoints"][0] for found in plain)


def test_prometheus_finds_what_carries_its_label() -> None:
    labels = {"release": "prometheus"}
    on = {"enabled": True, "labels": labels}
    found = objects({"monitoring": {"podMonitor": on, "rules": on}})
    monitored = [each for each in found if each["kind"] in ("PodMonitor", "PrometheusRule")]
    assert len(monitored) >= 3
    assert all(labels.items() <= each["metadata"]["labels"].items() for each in monitored)


def test_dashboards_carry_grafanas_label() -> None:
    found = of_kind("ConfigMap", {"monitoring": {"dashboards": {"enabled": True, "namespace": "grafana"}}})
    assert found
    for each in found:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert each["metadata"]["namespace"] == "grafana"


def test_prometheus_templates_in_alerts_survive_helm() -> None:
    rules = of_kind("PrometheusRule", {"monitoring": {"rules": {"enabled": True}}})
    assert "{{" in yaml.dump(rules, Dumper=yaml.CSafeDumper)


def rules_of(kind: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [one for found in of_kind("PrometheusRule", values) for one in found["spec"]["groups"]]
    return [rule for one in groups for rule in one["rules"] if kind in rule]


def test_alerts_tell_the_namespace_they_are_routed_by() -> None:
    values = {"monitoring": {"rules": {"enabled": True, "alertLabels": {"team": "llm"}}}}
    found = [rule["labels"] for rule in rules_of("alert", values)]
    assert found
    for labels in found:
        assert (labels["namespace"], labels["team"]) == ("serving", "llm")
        assert labels["severity"] in ("page", "ticket")
    recorded = rules_of("record", values)
    assert recorded
    assert not any("namespace" in rule.get("labels", {}) for rule in recorded)


def test_the_namespace_of_alerts_may_be_another() -> None:
    rules = {"enabled": True, "alertLabels": {"namespace": "prod/serving"}}
    found = {rule["labels"]["namespace"] for rule in rules_of("alert", {"monitoring": {"rules": rules}})}
    assert found == {"prod/serving"}


def without_namespace(spec: dict[str, Any]) -> dict[str, Any]:
    """The rules without the label that the chart adds."""
    found: dict[str, Any] = json.loads(json.dumps(spec))
    for rule in found["groups"][0]["rules"]:
        if "alert" in rule:
            del rule["labels"]["namespace"]
    return found


RULES: list[dict[str, object]] = [
    {},
    {"runbookBaseUrl": "https://git.example.org/docs/runbooks/"},
    {"sloTarget": 0.999},
    {"sloTarget": 0.94, "tierTargets": {"batch": 0.95, "interactive": 0.99}},
    {"job": "scraped-otherwise:8000", "tierTargets": {"interactive": 0.99}},
]


@pytest.mark.parametrize("rules", RULES)
def test_targets_links_and_jobs_are_as_the_command_would_write_them(rules: dict[str, Any]) -> None:
    values = {
        "config": {"tiers": {"batch": {}, "interactive": {}}},
        "monitoring": {"rules": {"enabled": True, **rules}},
    }
    found = {
        found["spec"]["groups"][0]["name"]: without_namespace(found["spec"])
        for found in of_kind("PrometheusRule", values)
    }
    targets = SloTargets(rules.get("sloTarget", 0.95), rules.get("tierTargets", {}))
    job = rules.get("job", "serving/demo-flotilla")
    texts = rule_files(targets, rules.get("runbookBaseUrl", RUNBOOKS), job)
    written = [plain(text) for text in texts.values()]
    assert found == {each["groups"][0]["name"]: each for each in written}


def test_rules_are_about_what_the_releases_own_monitor_scrapes() -> None:
    """The operator calls it `NAMESPACE/NAME`: two releases in one Prometheus have different rules."""
    on = {"monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}}
    for values in (on, {**on, "fullnameOverride": "other"}):
        monitor = of_kind("PodMonitor", values)[0]["metadata"]
        text = yaml.dump(of_kind("PrometheusRule", values), Dumper=yaml.CSafeDumper, width=10_000)
        named = f"{monitor['namespace']}/{monitor['name']}"
        assert set(re.findall(r'job="([^"]*)"', text.replace("\\", ""))) == {named}


def test_a_target_of_the_chart_is_one_that_the_command_takes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    shares = schema["properties"]["monitoring"]["properties"]["rules"]["properties"]["sloTarget"]
    assert LEAST_TARGET <= shares["minimum"] < LEAST_TARGET + 0.01
    assert shares["exclusiveMaximum"] == 1


def test_helm_test_is_a_hook() -> None:
    (pod,) = of_kind("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    compile(pod["spec"]["containers"][0]["args"][0], "first_token.py", "exec")


def test_helm_test_runs_where_it_may() -> None:
    tolerations = [{"key": "dedicated", "operator": "Exists"}]
    (pod,) = of_kind("Pod", {"tests": {"nodeSelector": {"pool": "llm"}, "tolerations": tolerations}})
    assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == ({"pool": "llm"}, tolerations)


def test_more_manifests_are_templates() -> None:
    manifest = "{apiVersion: v1, kind: ConfigMap, metadata: {name: '{{ .Release.Name }}-x'}}"
    (found,) = of_kind("ConfigMap", {"extraManifests": [manifest]})
    assert found["metadata"]["name"] == "demo-x"


def test_notes_say_how_to_reach_it() -> None:
    text = notes()
    assert "port-forward svc/demo-flotilla-serve-svc 8000:8000" in text
    assert "curl http://127.0.0.1:8000/v1/completions" in text


def test_notes_warn_of_an_open_service() -> None:
    assert "Warning" in notes()
    assert "Warning" not in notes(KEYS)
    assert "Authorization: Bearer" in notes(KEYS)


def test_values_for_openshift_are_those_of_the_documentation() -> None:
    document = (CHART.parents[1] / "docs" / "kubernetes.md").read_text()
    section = document[document.index("### OpenShift") :]
    values = yaml.safe_load(section[section.index("```yaml") + 7 :].partition("```")[0])
    pods = [template["spec"] for _, template in templates(cluster(values))]
    pods += [found["spec"] for found in of_kind("Pod", values)]
    for pod in pods:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"])
        assert pod["securityContext"]["runAsNonRoot"] is True
    closed = merged(values, {"autoscaler": {"enabled": False}, "networkPolicy": {"enabled": True}})
    closed["networkPolicy"]["egress"]["enabled"] = True
    (policy,) = of_kind("NetworkPolicy", closed)
    assert {"port": 5353, "protocol": "UDP"} in policy["spec"]["egress"][1]["ports"]
