{{/* What a schema of single values cannot see: rules of the operator, and values that contradict each other. */}}
{{- define "flotilla.checks" -}}
{{- $name := include "flotilla.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q must begin with a letter and hold lower-case letters, digits and `-`: choose another release name, or set fullnameOverride" $name) -}}
{{- end -}}

{{- $gpus := 0 -}}{{- $gpusOfPod := 0 -}}{{- $names := dict -}}{{- $running := list -}}
{{- range $index, $group := .Values.workerGroups -}}
{{- $where := printf "workerGroups[%d] (%s)" $index $group.name -}}
{{- if hasKey $names $group.name -}}{{- fail (printf "%s: another group has that name" $where) -}}{{- end -}}
{{- $_ := set $names $group.name true -}}
{{- $min := int $group.minReplicas -}}{{- $max := int $group.maxReplicas -}}
{{- $replicas := int (ternary $group.replicas $group.minReplicas (hasKey $group "replicas")) -}}
{{- if gt $min $max -}}{{- fail (printf "%s: minReplicas %d is above maxReplicas %d" $where $min $max) -}}{{- end -}}
{{- if or (lt $replicas $min) (gt $replicas $max) -}}
{{- fail (printf "%s: replicas %d is not between minReplicas %d and maxReplicas %d" $where $replicas $min $max) -}}
{{- end -}}
{{- if and (hasKey $group "idleTimeoutSeconds") (not $.Values.autoscaler.enabled) -}}
{{- fail (printf "%s: idleTimeoutSeconds without autoscaler.enabled, which the operator refuses" $where) -}}
{{- end -}}
{{- range $key := list "num-cpus" "num-gpus" "memory" "resources" "labels" -}}
{{- if hasKey (default (dict) $group.rayStartParams) $key -}}
{{- if eq $key "labels" -}}{{- fail (printf "%s: rayStartParams.labels is refused by the operator; use rayLabels" $where) -}}{{- end -}}
{{- if eq $key "resources" -}}{{- fail (printf "%s: rayStartParams.resources is made of rayResources and runs; use rayResources" $where) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $running = concat $running (include "flotilla.runs" $group | fromJsonArray) -}}
{{- $available := dig "podDisruptionBudget" "minAvailable" 0 $group | int -}}
{{- if gt $available $min -}}
{{- fail (printf "%s: podDisruptionBudget.minAvailable %d is above minReplicas %d: with so few pods no node could be drained" $where $available $min) -}}
{{- end -}}
{{- $gpus = add $gpus (mul $max (int (dig "gpu" "count" 0 $group))) -}}
{{- $gpusOfPod = max $gpusOfPod (int (dig "gpu" "count" 0 $group)) -}}
{{- end -}}

{{- range list "cells" "front-ends" -}}
{{- if not (has . $running) -}}{{- fail (printf "no group of workerGroups has %s among what it runs" .) -}}{{- end -}}
{{- end -}}

{{- $target := .Values.config.target -}}
{{- $perRank := dig "placement" "num_gpus" 0 $target | float64 -}}
{{- $ranks := default 1 $target.tensor_parallel | int -}}
{{- $first := $perRank -}}
{{- $needed := mulf (sub $ranks 1) $perRank -}}
{{- /* Two shares above a half are never of one GPU. */ -}}
{{- $whole := ternary (mulf (sub $ranks 1) (ceil $perRank)) 0.0 (gt $perRank 0.5) -}}
{{- $onOneNode := $perRank -}}{{- $shared := mulf $ranks $perRank -}}{{- $isSpread := false -}}
{{- range $index, $drafter := .Values.config.drafters -}}
{{- $placement := default (dict) .placement -}}
{{- $besideTarget := eq (default "anywhere" $placement.collocate) "target" -}}
{{- $reserves := or $placement.num_cpus $placement.num_gpus $placement.resources $placement.labels $besideTarget -}}
{{- if and (not (has .kind (list "heads" "eagle"))) (not $reserves) -}}
{{- fail (printf "config.drafters[%d] (%s) reserves nothing, so Ray may start it on the head: set its placement, such as {collocate: target}" $index (default .kind .name)) -}}
{{- end -}}
{{- $onGpu := and (gt $perRank 0.0) (ne (default "auto" $target.device) "cpu") (ne (default "auto" .device) "cpu") -}}
{{- if and (eq .kind "model") $besideTarget $onGpu (not $placement.num_gpus) -}}
{{- fail (printf "config.drafters[%d] (%s) has collocate: target and no share of the target's GPU, so it would run on the CPU: set placement.num_gpus of both, shares that sum to at most 1 such as 0.8 and 0.2, or device: cpu" $index .name) -}}
{{- end -}}
{{- $gpusOfDrafter := mulf (default 1 .replicas) (default 0 $placement.num_gpus) -}}
{{- if $besideTarget -}}
{{- $first = addf $first $gpusOfDrafter -}}
{{- else -}}
{{- $needed = addf $needed $gpusOfDrafter -}}
{{- if gt (default 0 $placement.num_gpus | float64) 0.5 -}}
{{- $whole = addf $whole (mulf (default 1 .replicas) (ceil $placement.num_gpus)) -}}
{{- end -}}
{{- end -}}
{{- $onOneNode = maxf $onOneNode (default 0 $placement.num_gpus) -}}
{{- if eq (default "anywhere" $placement.collocate) "own-node" -}}
{{- $isSpread = true -}}
{{- else if or $besideTarget (not $placement.labels) -}}
{{- $shared = addf $shared $gpusOfDrafter -}}
{{- end -}}
{{- end -}}
{{- /* As cluster/placement.py: who is beside the first rank is in its bundle, and one of more than a GPU has whole ones. */ -}}
{{- $first = round $first 4 -}}
{{- $needed = addf $needed (ternary (ceil $first) $first (gt $first 1.0)) -}}
{{- $needed = maxf $needed $whole (ternary (addf $whole (ceil $first)) 0.0 (gt $first 0.5)) -}}
{{- $cells := dig "scaling" "cells" "max" 1 .Values.config -}}
{{- if gt (mulf $needed $cells) (float64 $gpus) -}}
{{- fail (printf "config asks for %v GPUs (%v for each of at most %v cells), and workerGroups have at most %d (maxReplicas times gpu.count)" (mulf $needed $cells) $needed $cells $gpus) -}}
{{- end -}}
{{- /* A bundle is on one node; with a drafter on a node of its own, all ranks are in one. */ -}}
{{- $onOneNode = maxf $onOneNode $first (ternary $shared 0.0 $isSpread) -}}
{{- if eq (dig "pool" "strategy" "PACK" .Values.config) "STRICT_PACK" -}}{{- $onOneNode = maxf $onOneNode $needed -}}{{- end -}}
{{- if gt (round $onOneNode 4) (float64 $gpusOfPod) -}}
{{- fail (printf "config asks for %v GPUs on one node, for the target's first rank and who is beside it, or for all that must be together, and no pods of workerGroups have more than %d (gpu.count)" (ceil (round $onOneNode 4)) $gpusOfPod) -}}
{{- end -}}

{{- $tiers := default (dict) .Values.config.tiers -}}
{{- range $name, $tier := $tiers -}}
{{- $below := default "default" (default (dict) $tier).downgrade_to -}}
{{- if and (ne $below "default") (not (hasKey $tiers $below)) -}}
{{- fail (printf "config.tiers.%s.downgrade_to names %q; the tiers are: %s, default" $name $below (keys $tiers | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}

{{- range $tier, $_ := .Values.monitoring.rules.tierTargets -}}
{{- if and (ne $tier "default") (not (hasKey $tiers $tier)) -}}
{{- fail (printf "monitoring.rules.tierTargets names %q; the tiers of config.tiers are: %s, default" $tier (keys $tiers | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}

{{- if dig "http" "direct" false .Values.config -}}
{{- fail "config.http.direct must be false: on Kubernetes requests arrive through Ray Serve's proxies, whose health the operator watches" -}}
{{- end -}}
{{- range $key := list "tls_certificate" "tls_key" "tls_client_ca" -}}
{{- if dig "http" $key "" $.Values.config -}}
{{- fail (printf "config.http.%s has no effect behind Ray Serve's proxy: let ingress or httpRoute end TLS" $key) -}}
{{- end -}}
{{- end -}}
{{- if and (dig "http" "port" 8000 .Values.config | int | ne 8000) -}}
{{- fail "config.http.port is 8000, in pods and of the Service: let ingress or httpRoute listen on another" -}}
{{- end -}}
{{- if dig "metrics" "port" nil .Values.config -}}
{{- fail "config.metrics.port must be unset: Prometheus scrapes /metrics through the head's proxy" -}}
{{- end -}}
{{- if and (dig "http" "admin" false .Values.config) (not .Values.apiKeys.enabled) -}}
{{- fail "config.http.admin needs apiKeys.enabled: without keys it answers to clients on the same machine, which in a pod a proxy beside it makes everybody" -}}
{{- end -}}

{{- with .Values.models -}}
{{- if and (eq .source "pvc") (not .pvc.claimName) -}}{{- fail "models.pvc.claimName is required with models.source pvc" -}}{{- end -}}
{{- if and (eq .source "download") (not .download) -}}{{- fail "models.download is empty, and models.source says download" -}}{{- end -}}
{{- if and .download (ne .source "download") -}}{{- fail (printf "models.download is set, and models.source is %s" .source) -}}{{- end -}}
{{- $paths := dict "config.target.path" $target.path -}}
{{- range $index, $drafter := $.Values.config.drafters -}}
{{- $_ := set $paths (printf "config.drafters[%d].path" $index) (default "" .path) -}}
{{- end -}}
{{- range $index, $adapter := default list $target.adapters -}}
{{- $_ := set $paths (printf "config.target.adapters[%d].path" $index) (default "" .path) -}}
{{- end -}}
{{- $isMounted := false -}}
{{- range append $.Values.workerGroups $.Values.pods -}}
{{- range .volumeMounts -}}{{- if hasPrefix (printf "%s/" $.Values.models.mountPath) (printf "%s/" .mountPath) -}}{{- $isMounted = true -}}{{- end -}}{{- end -}}
{{- end -}}
{{- range $where, $path := $paths -}}
{{- if and (eq $.Values.models.source "none") (not $isMounted) (hasPrefix (printf "%s/" $.Values.models.mountPath) $path) -}}
{{- fail (printf "%s %s lies below models.mountPath, and models.source is none: set it to pvc or download, or mount a volume there" $where $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- with .Values.apiKeys -}}
{{- if and .enabled (not .existingSecret) (not .keys) -}}{{- fail "apiKeys.enabled needs apiKeys.existingSecret or apiKeys.keys" -}}{{- end -}}
{{- if and .existingSecret .keys -}}{{- fail "apiKeys.existingSecret and apiKeys.keys are both set; keys come from one of them" -}}{{- end -}}
{{- if and .keys (not .enabled) -}}{{- fail "apiKeys.keys is set, and apiKeys.enabled is false: nobody would be asked for a key" -}}{{- end -}}
{{- if and .enabled $.Values.monitoring.podMonitor.enabled (not .client.secretName) (not $.Values.monitoring.podMonitor.authorization.secretName) -}}
{{- fail "monitoring.podMonitor.authorization.secretName (or apiKeys.client.secretName, of a key with the permission metrics) is required with monitoring.podMonitor: /metrics asks for a key, too" -}}
{{- end -}}
{{- end -}}
{{- with .Values.monitoring.podMonitor -}}
{{- if and .authorization.secretName (not $.Values.apiKeys.enabled) -}}
{{- fail "monitoring.podMonitor.authorization is set, and apiKeys.enabled is false: /metrics asks for no key" -}}
{{- end -}}
{{- /* A rate over 5 minutes needs two samples in them: with fewer it has gaps, in which what alerts wait for begins anew. */ -}}
{{- if and .enabled $.Values.monitoring.rules.enabled (gt (include "flotilla.milliseconds" .interval | int64) 120000) -}}
{{- fail (printf "monitoring.podMonitor.interval %s with monitoring.rules.enabled: rules look at 5 minutes, and need at most 2m" .interval) -}}
{{- end -}}
{{- if and .scrapeTimeout (gt (include "flotilla.milliseconds" .scrapeTimeout | int64) (include "flotilla.milliseconds" .interval | int64)) -}}
{{- fail (printf "monitoring.podMonitor.scrapeTimeout %s is above interval %s, which Prometheus' operator refuses" .scrapeTimeout .interval) -}}
{{- end -}}
{{- end -}}
{{- if dig "security" "keys_file" "" .Values.config -}}{{- fail "config.security.keys_file is set by apiKeys" -}}{{- end -}}

{{- with .Values.gcsFaultTolerance -}}
{{- if and .enabled (not .redisAddress) -}}{{- fail "gcsFaultTolerance.redisAddress is required with gcsFaultTolerance.enabled" -}}{{- end -}}
{{- /* Redis' name and address are refused without fault tolerance, too: they would switch it on by the back door. */ -}}
{{- range $param, $field := dict "redis-password" "redisPassword" "redis-username" "redisUsername" -}}
{{- if and (or $.Values.gcsFaultTolerance.enabled (eq $param "redis-username")) (hasKey $.Values.head.rayStartParams $param) -}}
{{- fail (printf "head.rayStartParams.%s is set by the operator; use gcsFaultTolerance.%s" $param $field) -}}
{{- end -}}
{{- end -}}
{{- if and .redisUsername (not .redisPassword.secretName) -}}
{{- fail "gcsFaultTolerance.redisUsername is set without redisPassword.secretName: Redis takes no name alone" -}}
{{- end -}}
{{- $refused := list "REDIS_USERNAME" "RAY_REDIS_ADDRESS" -}}
{{- if .enabled -}}{{- $refused = concat $refused (list "REDIS_PASSWORD" "RAY_external_storage_namespace") -}}{{- end -}}
{{- range concat $.Values.pods.env (default (list) $.Values.head.env) -}}
{{- if has .name $refused -}}{{- fail (printf "%s in env is refused by the operator; use gcsFaultTolerance" .name) -}}{{- end -}}
{{- if eq .name "RAY_enable_autoscaler_v2" -}}
{{- fail "RAY_enable_autoscaler_v2 in env is refused by the operator; use autoscaler.enabled" -}}
{{- end -}}
{{- end -}}
{{- /* Of workers, which the operator looks at with fault tolerance alone. */ -}}
{{- range $index, $group := ternary $.Values.workerGroups list .enabled -}}
{{- range default (list) $group.env -}}
{{- if has .name (list "REDIS_PASSWORD" "RAY_REDIS_ADDRESS") -}}
{{- fail (printf "workerGroups[%d] (%s): %s in env is refused by the operator; use gcsFaultTolerance" $index $group.name .name) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default (dict) $group.rayStartParams) "redis-password" -}}
{{- fail (printf "workerGroups[%d] (%s): rayStartParams.redis-password is set by the operator; use gcsFaultTolerance.redisPassword" $index $group.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if hasKey .Values.head.rayStartParams "labels" -}}{{- fail "head.rayStartParams.labels is refused by the operator" -}}{{- end -}}

{{- with .Values.networkPolicy -}}
{{- if and .enabled $.Values.monitoring.podMonitor.enabled (not .monitoring) -}}
{{- fail "networkPolicy.monitoring is empty with monitoring.podMonitor.enabled: Prometheus must reach the pods" -}}
{{- end -}}
{{- if and .enabled .egress.enabled (not .egress.rules) -}}
{{- $reasons := dict "autoscaler.enabled: the autoscaler must reach the API server" $.Values.autoscaler.enabled -}}
{{- $_ := set $reasons "gcsFaultTolerance.enabled: the head must reach Redis" $.Values.gcsFaultTolerance.enabled -}}
{{- $_ := set $reasons "models.source download: pods must reach the Hub" (eq $.Values.models.source "download") -}}
{{- $_ := set $reasons "config.telemetry.otlp_endpoint: pods must reach the collector" (dig "telemetry" "otlp_endpoint" nil $.Values.config) -}}
{{- range $reason, $applies := $reasons -}}
{{- if $applies -}}{{- fail (printf "networkPolicy.egress.rules is empty with %s" $reason) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- with .Values.upgrade -}}
{{- if eq .type "NewClusterWithIncrementalUpgrade" -}}
{{- if not .incremental.gatewayClassName -}}{{- fail "upgrade.incremental.gatewayClassName is required with upgrade.type NewClusterWithIncrementalUpgrade" -}}{{- end -}}
{{- if not $.Values.autoscaler.enabled -}}{{- fail "upgrade.type NewClusterWithIncrementalUpgrade needs autoscaler.enabled" -}}{{- end -}}
{{- /* The operator ignores serveService then: it makes a Service for each cluster, a Gateway and an HTTPRoute of its own. */ -}}
{{- range $where, $is := dict "ingress.enabled" $.Values.ingress.enabled "httpRoute.enabled" $.Values.httpRoute.enabled "tests.enabled" $.Values.tests.enabled -}}
{{- if $is -}}
{{- fail (printf "%s with upgrade.type NewClusterWithIncrementalUpgrade: there is no Service %s then, requests arrive through the operator's own Gateway" $where (include "flotilla.serveService" $)) -}}
{{- end -}}
{{- end -}}
{{- if ne $.Values.service.type "ClusterIP" -}}
{{- fail "service.type with upgrade.type NewClusterWithIncrementalUpgrade: the operator ignores it" -}}
{{- end -}}
{{- if gt (int .incremental.stepSizePercent) (int .incremental.maxSurgePercent) -}}
{{- fail (printf "upgrade.incremental.stepSizePercent %v is above maxSurgePercent %v" .incremental.stepSizePercent .incremental.maxSurgePercent) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}{{- fail "httpRoute.parentRefs is required with httpRoute.enabled" -}}{{- end -}}
{{- if and .Values.ingress.tlsSecretName (not .Values.ingress.host) -}}{{- fail "ingress.host is required with ingress.tlsSecretName" -}}{{- end -}}
{{- end }}

{{/* Of a duration such as 15s. */}}
{{- define "flotilla.milliseconds" -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) (regexFind "[a-z]+$" .)) -}}
{{- end }}
