"""Do the objects of a Kubernetes installation name what exists? Pure: objects in, problems out.

Schemas see none of this: a ConfigMap that does not exist, a selector that selects nothing, a port that nobody has.
"""

from __future__ import annotations

from collections.abc import Iterator

from broker.access import ROLES
from tests.deploy.tools import Tree, containers, pod_templates

PASSWORDS = {f"redis_{role.replace('-', '_')}_password" for role in ROLES}
SECRETS = {"lagrange-secrets": {*PASSWORDS, "api_token", "engine_api_key"}}


def problems(objects: tuple[Tree, ...]) -> list[str]:
    """One sentence for each dangling reference."""
    return [
        *_volumes(objects),
        *_accounts_and_priorities(objects),
        *_selectors(objects),
        *_service_ports(objects),
        *_scale_targets(objects),
        *_policy_ports(objects),
    ]


def _named(objects: tuple[Tree, ...], kind: str) -> dict[str, Tree]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def _volumes(objects: tuple[Tree, ...]) -> Iterator[str]:
    maps, claims = _named(objects, "ConfigMap"), _named(objects, "PersistentVolumeClaim")
    templates = {
        item["metadata"]["name"]: {c["metadata"]["name"] for c in item["spec"].get("volumeClaimTemplates", [])}
        for item in objects
        if item["kind"] == "StatefulSet"
    }
    for name, template in pod_templates(objects):
        volumes = {v["name"] for v in template["spec"].get("volumes", [])} | templates.get(name, set())
        for volume in template["spec"].get("volumes", []):
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{name}: ConfigMap {volume['configMap']['name']} does not exist"
            if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in claims:
                yield f"{name}: PersistentVolumeClaim {volume['persistentVolumeClaim']['claimName']} does not exist"
            if "secret" in volume:
                keys = SECRETS.get(volume["secret"]["secretName"])
                if keys is None:
                    yield f"{name}: Secret {volume['secret']['secretName']} is not one that the documentation makes"
                elif missing := {item["key"] for item in volume["secret"].get("items", [])} - keys:
                    yield f"{name}: the Secret has no {sorted(missing)}"
        for container in containers(template):
            mounted = {m["name"]: m["mountPath"] for m in container.get("volumeMounts", [])}
            yield from (f"{name}/{container['name']}: no volume {v}" for v in mounted if v not in volumes)
            for variable in container.get("env", []):
                path = str(variable.get("value", ""))
                if variable["name"].endswith("_FILE") and not any(
                    path.startswith(mount + "/") for mount in mounted.values()
                ):
                    yield f"{name}/{container['name']}: {variable['name']} names {path}, which is not mounted"
                elif path.startswith("/run/secrets/") and not _secret_has(template, path.rsplit("/", 1)[1]):
                    yield f"{name}/{container['name']}: {variable['name']} names {path}, which the pod does not get"


def _secret_has(template: Tree, key: str) -> bool:
    return any(
        item["path"] == key
        for volume in template["spec"].get("volumes", [])
        for item in volume.get("secret", {}).get("items", [])
    )


def _accounts_and_priorities(objects: tuple[Tree, ...]) -> Iterator[str]:
    accounts, classes = _named(objects, "ServiceAccount"), _named(objects, "PriorityClass")
    for name, template in pod_templates(objects):
        if template["spec"].get("serviceAccountName") not in accounts:
            yield f"{name}: no ServiceAccount {template['spec'].get('serviceAccountName')}"
        if template["spec"].get("priorityClassName") not in classes:
            yield f"{name}: no PriorityClass {template['spec'].get('priorityClassName')}"


def _selects(selector: Tree, labels: Tree) -> bool:
    wanted = (
        selector.get("matchLabels", {}) if "matchLabels" in selector or "matchExpressions" in selector else selector
    )
    return all(labels.get(key) == value for key, value in wanted.items())


def _selectors(objects: tuple[Tree, ...]) -> Iterator[str]:
    pods = [template["metadata"]["labels"] for _, template in pod_templates(objects)]
    for item in objects:
        kind, name, spec = item["kind"], item["metadata"]["name"], item.get("spec", {})
        if kind in ("Deployment", "StatefulSet") and not _selects(
            spec["selector"], spec["template"]["metadata"]["labels"]
        ):
            yield f"{kind} {name}: its selector does not select its own pods"
        selectors = []
        if kind in ("Service", "PodDisruptionBudget"):
            selectors = [spec["selector"]]
        if kind == "NetworkPolicy":
            peers = [p for rule in spec.get("ingress", []) for p in rule.get("from", [])]
            peers += [p for rule in spec.get("egress", []) for p in rule.get("to", [])]
            selectors = [spec["podSelector"], *(p["podSelector"] for p in peers if "podSelector" in p)]
        yield from (
            f"{kind} {name}: selects no pod: {selector}"
            for selector in selectors
            if not any(_selects(selector, labels) for labels in pods)
        )
        if kind == "StatefulSet" and spec["serviceName"] not in _named(objects, "Service"):
            yield f"{kind} {name}: no Service {spec['serviceName']}"


def _service_ports(objects: tuple[Tree, ...]) -> Iterator[str]:
    for name, service in _named(objects, "Service").items():
        for _, template in pod_templates(objects):
            if not _selects(service["spec"]["selector"], template["metadata"]["labels"]):
                continue
            ports = [p for c in template["spec"]["containers"] for p in c.get("ports", [])]
            for port in service["spec"]["ports"]:
                target = port["targetPort"]
                hits = [p for p in ports if target in (p.get("name"), p["containerPort"])]
                if not hits:
                    yield f"Service {name}: no container port {target}"
                elif hits[0]["containerPort"] != port["port"]:
                    yield f"Service {name}: port {port['port']} is not the container's {hits[0]['containerPort']}"
    for name, template in pod_templates(objects):
        for container in containers(template):
            named = {p["name"] for p in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                wanted = container.get(probe, {}).get("httpGet", {}).get("port")
                if wanted is not None and wanted not in named:
                    yield f"{name}/{container['name']}: {probe} asks port {wanted}, which it does not have"


def _scale_targets(objects: tuple[Tree, ...]) -> Iterator[str]:
    for name, scaled in _named(objects, "ScaledObject").items():
        target = scaled["spec"]["scaleTargetRef"]["name"]
        deployment = _named(objects, "Deployment").get(target)
        if deployment is None:
            yield f"ScaledObject {name}: no Deployment {target}"
        elif "replicas" in deployment["spec"]:
            yield f"ScaledObject {name}: Deployment {target} sets replicas, which fights with the autoscaler"


def _policy_ports(objects: tuple[Tree, ...]) -> Iterator[str]:
    """What may go out from A to B on a port may come in at B from A, and the other way round."""
    out: set[tuple[str, str, object]] = set()
    into: set[tuple[str, str, object]] = set()
    for policy in _named(objects, "NetworkPolicy").values():
        spec = policy["spec"]
        me = spec["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component")
        for direction, key, found in (("egress", "to", out), ("ingress", "from", into)):
            for rule in spec.get(direction, []):
                for peer in rule.get(key, []):
                    other = peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component")
                    ports = [p["port"] for p in rule.get("ports", [{"port": "any"}])]
                    if me and other:
                        found |= {(me, other, p) if direction == "egress" else (other, me, p) for p in ports}
    yield from (
        f"NetworkPolicy: {a} may call {b}:{port}, which does not let it in" for a, b, port in sorted(out - into)
    )
    yield from (f"NetworkPolicy: {b}:{port} lets {a} in, which may not call" for a, b, port in sorted(into - out))
